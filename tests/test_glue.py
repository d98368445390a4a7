"""Tests what is particular to train/glue.py: every model learns, a step and the evaluation are
those of transformers, whose tools load the export.

What it shares with the other scripts is in test_scripts.py.
"""

import contextlib
import copy
import io
import re
import shutil
from dataclasses import dataclass, replace
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
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from trials import TRIALS

from data import glue as glue_data
from data import vocabulary
from models import architectures, classification, encoders
from train import glue
from train.common import checkpoint, device, loading

LEARNS = TRIALS["glue"].learns
LABELS = ("negative", "positive")  # of the synthetic task, by number


def sst2_validation() -> glue_data.Examples:
    """Returns the examples on which the trial is evaluated."""
    return glue_data.read("synthetic", "sst2", "validation")


# Training


# DistilBERT learns a regression, below.
@pytest.mark.parametrize(
    ("model", "task", "metric"),
    [
        pytest.param("roberta", "sst2", "accuracy", marks=pytest.mark.slow),
        pytest.param("xlnet", "cola", "mcc", marks=pytest.mark.slow),
    ],
)
def test_other_models_learn(model, task, metric, tmp_path):
    config = replace(
        LEARNS,
        model=model,
        task=task,
        lengths=(32,),
        epochs=0.75,
        eval_every=10_000,
        runs=str(tmp_path),
    )

    metrics = glue.main(config)

    assert metrics[metric] > 0.8


def test_what_is_not_given_is_the_models_recipe():
    found = glue.validate(glue.Config(data="x/y"))

    assert found.epochs == 3
    assert found.weight_decay == 0.01
    assert found.checkpoint == "google-bert/bert-base-uncased"


def test_what_is_given_stays_beside_the_models_recipe():
    config = glue.Config(model="roberta", data="x/y", lr=0.5, warmup=0.0, checkpoint="a/b")

    found = glue.validate(config)

    assert found.lr == 0.5
    assert found.warmup == 0.0
    assert found.checkpoint == "a/b"
    assert found.weight_decay == 0.1  # RoBERTa's


@pytest.mark.parametrize("checkpoint", ["", "new"])
def test_new_words_are_learnt_repeatably(monkeypatch, checkpoint):
    """A resumed run, and each host of a pod, learns them again."""
    learn = vocabulary.learn
    asked = []

    def watched(*args, repeatable=False):
        asked.append(repeatable)
        return learn(*args, repeatable=repeatable)

    monkeypatch.setattr(vocabulary, "learn", watched)
    glue.open_data(glue.validate(replace(glue.TINY, checkpoint=checkpoint)))

    assert asked == [True]


def gradient_norms(path: Path) -> list[float]:
    """Returns the norm of the gradients at each step that a run logged."""
    return [line["gradient_norm"] for line in records(path) if "lr" in line]


def test_micro_batches_give_the_numbers_of_the_whole_batch(monkeypatch, tmp_path):
    """One parameter is not trained, as sinusoidal positions, such as RoFormer's: gradient
    accumulation must not let it decay."""
    positions = "bert.embeddings.position_embeddings.weight"
    classifier = classification.classifier

    def partly_trained(*args):
        found = classifier(*args)
        found.model.get_parameter(positions).requires_grad_(False)
        return found

    monkeypatch.setattr(classification, "classifier", partly_trained)
    # without_dropout replaces it; registered here, it is restored after the test.
    monkeypatch.setattr(encoders, "new_configuration", encoders.new_configuration)
    without_dropout(encoders)
    # 16, 16 and 12 an epoch: a micro-batch of the last batch is half empty.
    fewer_sentences(monkeypatch, (44, 20))
    config = replace(
        LEARNS,
        lengths=(32,),
        batch_size=16,
        epochs=2,
        clip=0.1,
        log_every=1,
        runs=str(tmp_path),
    )

    whole_metrics = glue.main(replace(config, name="whole"))
    cut_metrics = glue.main(replace(config, name="cut", update_every=2))

    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    whole_losses = losses(whole)
    assert len(whole_losses) == 6
    assert losses(cut) == pytest.approx(whole_losses, rel=1e-4)
    assert max(whole_losses) - min(whole_losses) > 0.02
    assert cut_metrics == pytest.approx(whole_metrics, rel=1e-4)

    whole_norms = gradient_norms(whole)
    assert gradient_norms(cut) == pytest.approx(whole_norms, rel=1e-3)
    assert min(whole_norms) > 0.1, "nothing was clipped"
    assert torch.equal(exported(whole)[positions], exported(cut)[positions])


def test_a_step_is_that_of_plain_pytorch_on_the_cpu(mesh, monkeypatch):
    """Transformers' own model and loss, without the empty rows; clipped, with decay where it
    belongs."""
    config = replace(
        glue.validate(glue.TINY),
        task="mrpc",
        lengths=(64,),
        batch_size=8,
        lr=1e-3,
        weight_decay=10.0,
        clip=0.1,
    )
    torch.manual_seed(0)
    data = glue.open_data(config)
    plain = copy.deepcopy(randomized(data.model))
    fewer_sentences(monkeypatch, (6, 0))
    examples = glue_data.read("synthetic", "mrpc", "train")
    dataset = glue_data.Encoded(examples, data.tokenizer, 64)
    state = glue.build(config, data, mesh)
    batches = glue.batch_plan(config, dataset, mesh, train=False)
    with loading.parallel_loader(dataset, batches, mesh, train=False, workers=0) as loader:
        (batch,) = list(loader)
    assert batch["mask"].sum().item() == 6
    assert batch["input_ids"].shape == (8, 64)
    before = plain.classifier.weight.clone()
    # Adam makes a step of lr of any gradient, clipped or not. Beside an eps larger than the
    # gradients their size shows, and so does the clipping.
    eps = 1e-2
    for group in state.optimizer.param_groups:
        group["eps"] = eps

    found = device.compiled(glue.train_step, mesh)(state, batch, config, mesh)

    rows = loading.as_tensors(dataset.batch(np.arange(6), (64,)))
    rows["labels"] = rows["labels"].long()
    loss = plain(**rows).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    groups = architectures.parameter_groups(plain, 10.0)
    torch.optim.AdamW(groups, 1e-3, (0.9, 0.999), eps).step()
    assert found["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert found["gradient_norm"].item() == pytest.approx(norm.item(), rel=1e-4)
    assert norm > 0.5
    weights = checkpoint.to_host(state.model.state_dict())
    torch.testing.assert_close(weights, plain.state_dict(), rtol=1e-6, atol=2e-7)
    assert (plain.classifier.weight - before).abs().max() > 1e-4


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_biases_and_norms_do_not_decay_and_all_else_does(kind):
    config = glue.validate(replace(glue.TINY, model=kind))
    model = glue.open_data(config).model

    decayed, exempt = architectures.parameter_groups(model, 0.3)

    assert decayed["weight_decay"] == 0.3
    assert exempt["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(exempt["params"]) == len(list(model.parameters()))
    exempt_ids = {id(parameter) for parameter in exempt["params"]}
    biases = ("bias", "r_w_bias", "r_r_bias", "r_s_bias")
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            expected = isinstance(module, nn.LayerNorm) or name in biases
            assert (id(parameter) in exempt_ids) == expected, (type(module), name)


# Evaluation


def plain_metrics(
    folder: str, task: str, split: str, max_length: int, count: int
) -> dict[str, float]:
    """Returns the metrics of an export on the `count` examples of a split, by transformers alone,
    an example at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    examples = glue_data.read("synthetic", task, split)
    assert len(examples) == count

    rows = []
    for first, second in zip(examples.first, examples.second, strict=True):
        encoded = tokenizer(
            first, second, truncation=True, max_length=max_length, return_tensors="pt"
        )
        with torch.no_grad():
            rows.append(model(**encoded).logits[0])
    logits = torch.stack(rows)
    labels = torch.tensor(examples.labels)

    if model.num_labels == 1:
        predictions = logits[:, 0]
        loss = F.mse_loss(predictions, labels)
    else:
        predictions = logits.argmax(1)
        loss = F.cross_entropy(logits, labels)
    metrics = glue_data.score(task, predictions.numpy(), examples.labels)
    return metrics | {"loss": loss.item()}


MNLI_SIZES = (64, 77)  # training and evaluation examples


@dataclass(frozen=True)
class MnliRun:
    """A finished run on MNLI."""

    export: str
    metrics: dict[str, float]
    output: str


@pytest.fixture(scope="module")
def mnli_run(mesh, tmp_path_factory) -> MnliRun:
    """Trains on MNLI and evaluates 77 examples in batches of 32, in two shapes, the longer of which
    is too short for some of them."""
    runs = str(tmp_path_factory.mktemp("mnli"))
    config = replace(
        glue.TINY,
        model="distilbert",
        task="mnli",
        lengths=(24, 40),
        epochs=1,
        runs=runs,
        name="mnli",
    )

    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        fewer_sentences(patch, MNLI_SIZES)
        metrics = glue.main(config)
    return MnliRun(f"{runs}/mnli/export", metrics, output.getvalue())


@pytest.mark.parametrize(
    ("split", "prefix"),
    [("validation_matched", ""), ("validation_mismatched", "mismatched_")],
)
def test_every_example_of_both_mnli_splits_counts_once(mnli_run, split, prefix, monkeypatch):
    fewer_sentences(monkeypatch, MNLI_SIZES)

    expected = plain_metrics(mnli_run.export, "mnli", split, max_length=40, count=77)

    found = {name: mnli_run.metrics[prefix + name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-4)


def test_each_mnli_split_has_metrics_of_its_own(mnli_run):
    metrics = mnli_run.metrics

    assert set(metrics) == {"accuracy", "loss", "mismatched_accuracy", "mismatched_loss"}
    assert metrics["loss"] != metrics["mismatched_loss"]


def test_a_start_says_how_many_examples_are_cut(mnli_run, monkeypatch):
    fewer_sentences(monkeypatch, MNLI_SIZES)
    examples = glue_data.read("synthetic", "mnli", "train")
    tokenizer = AutoTokenizer.from_pretrained(mnli_run.export)
    rows = tokenizer(examples.first, examples.second)["input_ids"]

    cut = sum(len(row) > 40 for row in rows)

    assert 0 < cut < 64
    assert f"64 examples ({cut} cut to 40 tokens)" in mnli_run.output


@pytest.mark.slow  # test_own_text.py learns one
def test_a_regression_learns_and_counts_every_example_once(tmp_path, monkeypatch):
    fewer_sentences(monkeypatch, (2048, 141))
    config = replace(
        glue.TINY,
        model="distilbert",
        task="stsb",
        lengths=(32,),
        epochs=3,
        eval_every=10_000,
        runs=str(tmp_path),
        name="stsb",
    )

    metrics = glue.main(config)

    assert metrics["pearson"] > 0.8
    assert metrics["spearman"] > 0.8
    export = f"{tmp_path}/stsb/export"
    expected = plain_metrics(export, "stsb", "validation", max_length=32, count=141)
    assert metrics == pytest.approx(expected, rel=1e-4)


# The export


def test_the_export_is_a_pipeline_with_the_runs_accuracy(trained):
    path, metrics, _ = trained
    classify = transformers.pipeline("text-classification", model=f"{path}/export", device="cpu")
    examples = sst2_validation()

    found = [answer["label"] for answer in classify(examples.first, batch_size=64)]

    assert set(found) == {"negative", "positive"}
    expected = [LABELS[label] for label in examples.labels]
    right = np.array(found) == np.array(expected)
    assert right.mean() == metrics["accuracy"]


def test_the_exports_model_card_has_the_runs_metrics(trained):
    path, metrics, _ = trained

    card = ModelCard.load(f"{path}/export/README.md").data

    on_card = {result.metric_type: result.metric_value for result in card.eval_results}
    assert on_card == metrics
    assert summary(path)["metrics"] == metrics
    assert card.pipeline_tag == "text-classification"
    assert card.base_model is None
    assert card.datasets is None


def test_the_page_classifies_a_sentence_and_a_pair(trained, capsys):
    path, *_ = trained
    code = page_code("exports.md", "BERT and its kin in transformers", **{"runs/<name>": path})

    exec(code.split("\n\ntag = ")[0], {})

    output = capsys.readouterr().out
    answers = re.findall(r"'label': '(negative|positive)', 'score': 0\.\d+", output)
    assert len(answers) == 2, output


def test_training_starts_from_an_export(trained):
    path, _, config = trained
    weights = exported(path)

    data = glue.open_data(glue.validate(replace(config, checkpoint=f"{path}/export")))

    assert data.head_message == "", "the head is as it was"
    opened = data.model.state_dict()
    assert equal({name: opened[name] for name in weights}, weights)
    assert len(weights) >= len(list(data.model.parameters()))
    text = "the dog, one of six."
    tokenizer = AutoTokenizer.from_pretrained(f"{path}/export")
    assert data.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_an_export_without_its_weights_is_trained_anew(trained):
    path, _, config = trained
    config = glue.validate(replace(config, checkpoint=f"{path}/export"))

    model = glue.open_data(replace(config, pretrained=False, model="auto")).model

    name = "classifier.weight"
    assert not torch.equal(model.state_dict()[name], exported(path)[name])
    tokenizer = AutoTokenizer.from_pretrained(f"{path}/export")
    assert model.config.vocab_size == len(tokenizer)


# The head of a checkpoint


def reordered(path: str, folder: Path, names: dict[int, str]) -> str:
    """Writes the run's export as another library might have left it: the rows of its head in the
    other order, and named so. Returns the folder."""
    shutil.copytree(f"{path}/export", folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        for parameter in (model.classifier.weight, model.classifier.bias):
            parameter.copy_(parameter.flip(0))
    model.config.id2label = names
    model.config.label2id = {name: number for number, name in names.items()}
    model.save_pretrained(folder)
    return str(folder)


def answers(folder: str, numbers: dict[str, int]) -> np.ndarray:
    """Returns the numbers of the classes that transformers' pipeline finds in the synthetic
    task."""
    classify = transformers.pipeline("text-classification", model=folder, device="cpu")
    found = classify(sst2_validation().first, batch_size=64)
    return np.array([numbers[answer["label"]] for answer in found])


@pytest.mark.parametrize("names", [{0: "positive", 1: "negative"}, {0: "POSITIVE", 1: "Negative"}])
def test_reordered_classes_are_evaluated_by_their_names(names, trained, tmp_path, capsys):
    path, metrics, config = trained
    labels = sst2_validation().labels
    folder = reordered(path, tmp_path / "theirs", names)
    their_numbers = {names[0]: 1, names[1]: 0}
    accuracy = (answers(folder, their_numbers) == labels).mean()
    assert accuracy == metrics["accuracy"]
    assert accuracy > 0.9
    config = replace(config, checkpoint=folder, lr=0.0, epochs=0.1, runs=str(tmp_path), name="run")

    found = glue.main(config)

    assert found["accuracy"] == accuracy
    order = f"order {names[0]}, {names[1]}, the data negative, positive"
    assert order in capsys.readouterr().out
    again = answers(f"{tmp_path}/run/export", {"negative": 0, "positive": 1})
    assert (again == labels).mean() == accuracy


@pytest.fixture(scope="module")
def nameless(run_of, tmp_path_factory) -> str:
    """Writes the trial's export with its head in the other order and without names of classes."""
    path, *_ = run_of("glue")
    folder = tmp_path_factory.mktemp("nameless") / "theirs"
    return reordered(path, folder, {0: "LABEL_0", 1: "LABEL_1"})


def test_classes_without_names_are_not_evaluated_untrained(nameless, refused):
    flags = f"tiny --checkpoint {nameless} --lr 0 --epochs 0.1"
    pattern = "does not name the 2 classes.*without training.*--labels negative,positive"

    refused(glue, flags, pattern)


def test_stated_labels_must_be_the_tasks(nameless, refused):
    flags = f"tiny --checkpoint {nameless} --lr 0 --epochs 0.1 --labels good,bad"

    refused(glue, flags, "--labels is good,bad; expected negative,positive")


def test_classes_without_names_are_evaluated_as_stated(nameless, trained, tmp_path):
    _, metrics, config = trained
    config = replace(
        config,
        checkpoint=nameless,
        labels="Positive, negative",
        lr=0.0,
        epochs=0.1,
        runs=str(tmp_path),
        name="stated",
    )

    found = glue.main(config)

    assert found["accuracy"] == metrics["accuracy"]
    names = AutoConfig.from_pretrained(f"{tmp_path}/stated/export").label2id
    assert set(names) == {"negative", "positive"}


def test_training_says_which_order_nameless_classes_have(nameless, trained, tmp_path, capsys):
    _, _, config = trained
    config = replace(
        config, checkpoint=nameless, lr=1e-9, epochs=0.1, runs=str(tmp_path), name="trained"
    )

    glue.main(config)

    assert "taken to be in the order negative, positive" in capsys.readouterr().out
    names = AutoConfig.from_pretrained(f"{tmp_path}/trained/export").id2label
    assert names == {0: "negative", 1: "positive"}


@pytest.fixture(scope="module")
def spam_filter(run_of, tmp_path_factory) -> str:
    """Writes the trial's export with a head for other classes."""
    path, *_ = run_of("glue")
    folder = tmp_path_factory.mktemp("spam_filter") / "theirs"
    return reordered(path, folder, {0: "spam", 1: "ham"})


def test_a_head_for_other_classes_is_not_evaluated(spam_filter, refused):
    pattern = "classes spam, ham.*negative, positive.*without training"

    refused(glue, f"tiny --checkpoint {spam_filter} --lr 0", pattern)


def test_a_head_for_other_classes_is_trained_anew(spam_filter, trained, tmp_path, capsys):
    _, _, config = trained

    glue.main(replace(config, checkpoint=spam_filter, epochs=0.1, runs=str(tmp_path), name="run"))

    output = capsys.readouterr().out
    assert re.search("the head is new: .* spam, ham, .* negative, positive", output)


# What is refused


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (
            "--labels negative,positive",
            "--labels is negative,positive; it is for the head of a --checkpoint",
        ),
        (
            "--labels negative,positive --checkpoint EXPORT --no-pretrained",
            "for the head of a --checkpoint",
        ),
        (
            "--labels a,b --task stsb --checkpoint EXPORT",
            "stsb is a regression and has no classes",
        ),
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
    path, *_ = trained

    refused(glue, "tiny " + flags.replace("EXPORT", f"{path}/export"), pattern)
