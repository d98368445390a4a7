"""Tests what is particular to train/pretrain.py: every objective is learned, gradient accumulation
gives the numbers of the whole batch, and the export loads in transformers, fairseq and train.glue.

The rest is in test_scripts.py.
"""

import copy
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from eager_runs import without_dropout
from helpers import assert_graph_contract, equal, exported, losses, records
from timm.optim import Lamb
from torch.nn.utils import parameters_to_vector
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoTokenizer,
    BertConfig,
    pipeline,
)
from trials import TRIALS

from data import pretraining, vocabulary
from data.prepare import text as prepare_text
from errors import InputError
from models import encoders, objectives
from train import glue, pretrain
from train.common import accumulate, loading
from train.common.mesh import Layout
from train.common.xla import backend as xla

LEARNS = TRIALS["pretrain"].learns
SHORT = TRIALS["pretrain"].short


@pytest.fixture(scope="module")
def fairseq(tmp_path_factory):
    """Trains a RoBERTa in fairseq's format until it has learned something; as `trained`."""
    runs = str(tmp_path_factory.mktemp("runs"))
    config = replace(LEARNS, model="fairseq-roberta", steps=60, runs=runs, name="run")
    return f"{runs}/run", pretrain.main(config), config


def example_batch(rows: pretraining.TextRows, count: int) -> dict[str, torch.Tensor]:
    """Returns a batch of the first `count` rows, each with random numbers of its own."""
    examples = [rows.example(row, np.random.default_rng(row)) for row in range(count)]
    return loading.as_tensors(examples)


# Objectives


@pytest.mark.slow
def test_fairseqs_roberta_learns_what_its_twin_does(fairseq, tmp_path):
    path, metrics, config = fairseq

    twin_metrics = pretrain.main(replace(config, model="roberta", runs=str(tmp_path)))

    assert losses(path)[0] > 5.5
    assert metrics["loss"] < 3.8
    assert metrics["accuracy"] > 0.15
    assert twin_metrics == metrics
    assert not os.path.exists(tmp_path / "run/export/fairseq")
    assert equal(exported(tmp_path / "run"), exported(path))


def guess(config: pretrain.Config) -> float:
    """Returns the accuracy of always naming the commonest token."""
    valid_set = pretrain.open_data(pretrain.validate(config)).eval
    batch = example_batch(valid_set, len(valid_set))
    labels = batch["labels"][batch["weights"] > 0]
    return labels.bincount().max().item() / batch["weights"].sum().item()


@pytest.mark.slow
def test_a_permutation_is_learned(tmp_path):
    path = tmp_path / "run"
    config = replace(
        LEARNS,
        model="xlnet",
        steps=60,
        warmup_steps=20,
        precision="bfloat16",
        runs=str(tmp_path),
        name="run",
    )
    before = xla.compilations()

    metrics = pretrain.main(config)

    assert losses(path)[0] > 4.5
    assert metrics["loss"] < 3.6
    assert metrics["accuracy"] > 1.5 * guess(config)
    assert_graph_contract(path)
    assert xla.compilations() - before <= 4
    model = AutoModelForPreTraining.from_pretrained(path / "export")
    assert type(model).__name__ == "XLNetLMHeadModel"


@pytest.mark.slow
def test_a_student_learns_from_the_teacher_that_a_run_exported(trained, tmp_path):
    teacher_path, teacher_metrics, _ = trained
    path = tmp_path / "run"
    config = replace(
        LEARNS,
        model="distilbert",
        teacher=f"{teacher_path}/export",
        steps=30,
        warmup_steps=5,
        lr=1e-3,
        precision="bfloat16",
        runs=str(tmp_path),
        name="run",
    )

    metrics = pretrain.main(config)

    lines = [record for record in records(path) if "soft" in record]
    first = lines[0]
    last = lines[-1]
    # It begins with a layer of its teacher, which is worth something.
    assert first["words"] - 0.2 < 4.2
    assert metrics["loss"] < first["words"] - 0.2
    assert metrics["loss"] > teacher_metrics["loss"]
    assert last["soft"] < 0.6 * first["soft"]
    assert last["cosine"] < 0.8 * first["cosine"]
    assert_graph_contract(path)
    model = AutoModelForMaskedLM.from_pretrained(path / "export")
    assert type(model).__name__ == "DistilBertForMaskedLM"
    assert model.config.n_layers == 1


@pytest.mark.slow
def test_next_sentences_whole_words_lamb_and_micro_batches(tmp_path):
    """All in one run."""
    path = tmp_path / "run"
    config = replace(
        SHORT,
        next_sentence=True,
        whole_words=True,
        optimizer="lamb",
        update_every=2,
        lr=0.02,
        steps=12,
        precision="bfloat16",
        runs=str(tmp_path),
        name="run",
    )

    metrics = pretrain.main(config)

    assert 0.3 < metrics["next_sentence_accuracy"] < 1
    found = losses(path)
    assert len(found) == 12
    assert found[0] > 5.3  # log(116 words) + log(2)
    assert found[-1] < found[0] - 0.5
    assert_graph_contract(path)
    _, loaded = AutoModelForPreTraining.from_pretrained(path / "export", output_loading_info=True)
    assert "cls.seq_relationship.weight" in exported(path)
    assert not loaded["missing_keys"]


# Gradient accumulation


def test_unequal_micro_batches_update_as_their_rows_in_one_batch(mesh, monkeypatch):
    """On the host, with plain gradient descent, clipped."""
    whole_config = pretrain.TINY
    cut_config = replace(pretrain.TINY, update_every=2)
    clipped = replace(encoders.by_name("bert").pretraining, clip=0.125)
    monkeypatch.setattr(pretrain, "recipe_of", lambda config: clipped)
    data = pretrain.open_data(cut_config)
    batch = example_batch(data.train, 8)
    batch["weights"][:4, 1:] = 0

    micro_batches = []
    for rows in (slice(0, 4), slice(4, 8)):
        micro_batches.append({name: values[rows] for name, values in batch.items()})
    first_counts = objectives.counts(micro_batches[0])
    second_counts = objectives.counts(micro_batches[1])
    assert second_counts["predicted"].sum() > 2 * first_counts["predicted"].sum()
    for micro_batch in micro_batches:
        for name in first_counts:
            micro_batch[name] = first_counts[name] + second_counts[name]

    initial = data.model.eval()  # no dropout
    whole_model = copy.deepcopy(initial)
    cut_model = copy.deepcopy(initial)
    whole_optimizer = torch.optim.SGD(whole_model.parameters(), 1.0)
    cut_optimizer = torch.optim.SGD(cut_model.parameters(), 1.0)
    whole_state = pretrain.State(whole_model, None, whole_optimizer)
    cut_state = pretrain.State(cut_model, None, cut_optimizer)

    whole = pretrain.train_step(whole_state, batch, whole_config, mesh)
    totals = {"loss": torch.zeros(()), "words": torch.zeros(())}
    for micro_batch in micro_batches:
        accumulate.gradient_step(pretrain.forward, cut_state, micro_batch, totals, cut_config, mesh)
    found = accumulate.update_step(pretrain.update, cut_state, totals, cut_config, "")

    torch.testing.assert_close(found, whole)
    assert whole["loss"] == whole["words"]
    assert whole["words"] > 4
    assert totals["loss"] == 0
    assert not any(parameter.grad.any() for parameter in cut_model.parameters())
    before = parameters_to_vector(initial.parameters())
    whole_move = before - parameters_to_vector(whole_model.parameters())
    cut_move = before - parameters_to_vector(cut_model.parameters())
    torch.testing.assert_close(whole_move, cut_move, rtol=1e-4, atol=1e-6)
    assert whole_move.norm().item() == pytest.approx(0.125, rel=1e-4)


@pytest.mark.slow  # test_glue.py has its twin
def test_micro_batches_give_the_numbers_of_the_whole_batch(tmp_path, monkeypatch):
    """Eight micro-batches of four rows, one on each device; the rows have unequal numbers of
    predicted tokens."""
    # without_dropout replaces it; registered here, it is restored after the test.
    monkeypatch.setattr(encoders, "new_configuration", encoders.new_configuration)
    without_dropout(encoders)
    config = replace(
        SHORT,
        next_sentence=True,
        steps=3,
        warmup_steps=2,
        eval_every=3,
        runs=str(tmp_path),
    )

    whole_metrics = pretrain.main(replace(config, name="whole"))
    cut_metrics = pretrain.main(replace(config, name="cut", update_every=8))

    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    whole_losses = losses(whole)
    assert len(whole_losses) == 3
    assert losses(cut) == pytest.approx(whole_losses, rel=1e-5)
    assert max(whole_losses) - min(whole_losses) > 0.1
    assert cut_metrics == pytest.approx(whole_metrics, rel=1e-4)
    # A weight moves by up to 7e-3 here; where its gradient is rounding alone, Adam makes steps of
    # that.
    torch.testing.assert_close(exported(cut), exported(whole), rtol=0, atol=1e-3)


# Recipes


def test_a_models_recipe_fills_what_is_not_given():
    config = pretrain.validate(pretrain.Config(model="roberta", data="somewhere", lr=1.0))

    assert config.batch_size == 8192
    assert config.steps == 500_000
    assert config.lr == 1.0  # as given
    assert config.warmup_steps == 24_000


def test_the_default_batch_is_berts():
    config = pretrain.validate(pretrain.Config(data="somewhere"))

    assert config.batch_size == 256


@pytest.mark.parametrize(
    ("model", "size", "batch_size", "lr"),
    [
        ("bert", "large", 256, 1e-4),
        ("roberta", "large", 8192, 4e-4),
        ("xlnet", "large", 8192, 4e-4),
        ("fairseq-roberta", "1.3b", 1024, 1e-4),
    ],
)
def test_a_size_has_a_recipe_of_its_own(model, size, batch_size, lr):
    config = pretrain.validate(pretrain.Config(model=model, size=size, data="somewhere"))

    assert config.batch_size == batch_size
    assert config.lr == lr


@pytest.mark.parametrize("name", encoders.PRETRAINED)
def test_the_optimizer_has_the_recipes_settings(name, mesh):
    recipe = encoders.by_name(name).pretraining
    config = replace(pretrain.TINY, model=name)
    # A DistilBERT cannot be opened without a teacher; a BERT has as many groups of parameters.
    model = "bert" if name == "distilbert" else name
    data = pretrain.open_data(replace(config, model=model))

    optimizer = pretrain.build(config, data, mesh).optimizer

    decayed, spared = optimizer.param_groups
    assert decayed["weight_decay"] == recipe.weight_decay
    assert spared["weight_decay"] == 0.0
    assert decayed["betas"] == (0.9, recipe.beta2)
    assert decayed["eps"] == 1e-6


def test_lamb_does_not_clip_gradients(mesh):
    config = replace(pretrain.TINY, optimizer="lamb")

    optimizer = pretrain.build(config, pretrain.open_data(config), mesh).optimizer

    assert isinstance(optimizer, Lamb)
    assert optimizer.defaults["max_grad_norm"] is None


@pytest.mark.parametrize(
    ("kind", "length", "expected"), [("bert", 128, 21), ("bert", 512, 82), ("xlnet", 512, 88)]
)
@pytest.mark.parametrize("given", [0, 7])
def test_predictions_per_row(kind, length, expected, given):
    rows = pretraining.open_rows(
        "synthetic",
        "valid",
        kind,
        predictions=given,
        whole_words=False,
        next_sentence=False,
        trial=(length, 0),
    )

    assert rows.predictions == (given or expected)


# The export


@pytest.fixture(scope="module")
def validation_rows(run_of) -> pretraining.TextRows:
    """Opens the rows on which the trial is evaluated."""
    _, _, config = run_of("pretrain")
    return pretrain.open_data(config).eval


def test_transformers_finds_the_metrics_of_the_run(trained, validation_rows, mesh):
    path, metrics, config = trained
    model = AutoModelForMaskedLM.from_pretrained(f"{path}/export").eval()
    size = len(validation_rows)
    loader = loading.parallel_loader(
        validation_rows, size, mesh, train=False, seed=config.seed, workers=0
    )
    with loader as batches:
        (on_devices,) = list(batches)
    batch = {name: value.cpu() for name, value in on_devices.items()}
    assert batch["mask"].all()

    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    rows, slots = torch.nonzero(batch["weights"], as_tuple=True)
    positions = batch["positions"][rows, slots].long()
    labels = batch["labels"][rows, slots].long()
    predicted = logits[rows, positions]
    loss = torch.nn.functional.cross_entropy(predicted, labels).item()
    accuracy = (predicted.argmax(-1) == labels).float().mean().item()
    assert loss == pytest.approx(metrics["loss"], rel=1e-5)
    assert accuracy == pytest.approx(metrics["accuracy"], rel=1e-5)


def test_the_export_has_the_runs_vocabulary(trained, validation_rows):
    path, *_ = trained

    tokenizer = AutoTokenizer.from_pretrained(f"{path}/export")

    assert tokenizer.get_vocab() == validation_rows.text.tokenizer.get_vocab()


def test_transformers_pipeline_fills_a_mask(trained):
    path, *_ = trained
    fill = pipeline("fill-mask", model=f"{path}/export", tokenizer=f"{path}/export")

    # A word has the number after that of the word before it, see data/text.py.
    best = fill("bano [MASK] bara base.")[0]

    assert set(best) >= {"token_str", "score"}


@pytest.mark.parametrize(
    ("run", "export"),
    [
        ("trained", "export"),
        pytest.param("fairseq", "export/fairseq", marks=pytest.mark.slow),
    ],
)
def test_pretraining_continues_from_an_export(run, export, tmp_path, request):
    path, metrics, config = request.getfixturevalue(run)
    config = replace(
        config, checkpoint=f"{path}/{export}", lr=0.0, steps=2, runs=str(tmp_path), name="next"
    )

    found = pretrain.main(config)

    assert found == pytest.approx(metrics, rel=1e-5)
    assert losses(tmp_path / "next")[0] < metrics["loss"] + 0.5
    if run == "trained":
        assert equal(exported(tmp_path / "next"), exported(path))


# Prepared text


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    """Writes a folder of rows, beside the text that they are made from: five judgements a document,
    good or bad."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    subjects = ["film", "plot", "cast", "song"]
    bad = ("awful", "dull", "poor", "grim")
    good = ("fine", "lovely", "great", "bright")

    judgements = []
    for number in range(750):
        subject = rng.choice(subjects)
        first, second = rng.choice(good if number % 2 else bad, 2)
        judgements.append(f"The {subject} was {first} and also {second}.")
    documents = []
    for start in range(0, len(judgements), 5):
        documents.append("\n".join(judgements[start : start + 5]))
    text = folder / "all.txt"
    text.write_text("\n\n".join(documents) + "\n")

    out = str(folder / "rows")
    options = "--kind bert --length 32 --vocab-size 116 --valid-share 0.2 --workers 1"
    prepare_text.main(["--data", str(text), "--out", out, *options.split()])
    return out


def test_a_prepared_text_is_learned_and_fine_tuned(rows, tmp_path):
    """Fine-tuning begins with the weights of the export."""
    config = replace(LEARNS, data=rows, steps=40, warmup_steps=10, runs=str(tmp_path), name="run")

    metrics = pretrain.main(config)

    path = tmp_path / "run"
    assert losses(path)[0] > 3.5
    assert metrics["loss"] < 2.5
    fine_tuning = replace(glue.TINY, lengths=(24,), checkpoint=f"{path}/export")
    opened = glue.open_data(glue.validate(fine_tuning)).model.state_dict()
    weights = {}
    for name, value in exported(path).items():
        if name.startswith("bert."):
            weights[name] = value
    assert len(weights) > 10
    assert equal({name: opened[name] for name in weights}, weights)

    assert pretrain.main(pretrain.Config(evaluate=str(path))) == metrics
    of_training = pretrain.main(pretrain.Config(evaluate=str(path), split="train"))
    assert of_training != metrics
    assert of_training["loss"] < 2.5
    file = json.loads((path / "evaluations/rows-train.json").read_text())
    report = json.loads(Path(rows, "report.json").read_text())
    assert file["examples"] == report["train"]["rows"]


def test_rows_of_other_words_are_not_evaluated(trained, rows):
    path, *_ = trained
    with pytest.raises(InputError, match="has other tokens than the data in .*rows"):
        pretrain.main(pretrain.Config(evaluate=path, data=rows))
    with pytest.raises(InputError, match="--split is test; expected train or valid"):
        pretrain.main(pretrain.Config(evaluate=path, split="test"))


# Teachers, and what is refused


@pytest.fixture
def teacher(trained, tmp_path):
    """Writes a new BERT with the tokens of the small language: teacher(hidden_size=96)."""
    path, *_ = trained

    def write(**settings) -> str:
        config = BertConfig.from_pretrained(f"{path}/export", **settings)
        folder = tmp_path / "teacher"
        shutil.copytree(f"{path}/export", folder)
        AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
        return str(folder)

    return write


@pytest.fixture(scope="module")
def roberta(tmp_path_factory) -> str:
    """A folder with a new RoBERTa, as transformers writes it."""
    folder = str(tmp_path_factory.mktemp("roberta"))
    tokenizer = vocabulary.learn(["a b c d e f"], "roberta", 300)
    settings = encoders.new_configuration("roberta", "tiny", tokenizer, 32)
    AutoModelForMaskedLM.from_config(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Settings of the teachers that the next test writes.
TEACHERS = {
    "@short": {"max_position_embeddings": 31},
    "@wide": {"hidden_size": 96},
    "@words": {"vocab_size": 128},
    "@flat": {"num_hidden_layers": 0},
}


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--data /nowhere/at/all", "/nowhere/at/all.*make data"),
        ("--model roberta --next-sentence", "--next-sentence.*bert.*roberta"),
        ("--model distilbert --data /some/text", "--teacher is missing.*bert-base-uncased"),
        ("--data @text", "@text has no report.json.*all.txt.*make data"),
        ("--data @rows --model xlnet", "--kind bert.*needs (--kind )?xlnet"),
        ("--checkpoint @roberta", "@roberta is a roberta, not a bert"),
        ("--model fairseq-roberta --checkpoint @roberta", "@roberta.*model.pt"),
        ("--checkpoint @bert --data @rows", "@bert.*other tokens.*@rows"),
        ("--checkpoint @short", "rows have 32 tokens.*31 positions"),
        ("--model distilbert --teacher @bert --data @rows", "@bert.*other tokens.*@rows"),
        ("--model distilbert --teacher @roberta", "@roberta.*is a roberta, not a bert"),
        ("--model distilbert --teacher @short", "teacher @short.*31 positions.*32"),
        ("--model distilbert --teacher @wide", "@wide.*width of 96.*64"),
        ("--model distilbert --teacher @flat", "@flat.*0 layers.*has 1"),
        ("--model distilbert --teacher @words", "@words.*vocabulary of 128.*one of 116"),
    ],
)
def test_values_that_are_refused(refused, trained, roberta, rows, teacher, flags, pattern):
    """A word with @ stands for a folder, in the flags and in the pattern."""
    bert_path, *_ = trained
    folders = {
        "@bert": f"{bert_path}/export",
        "@roberta": roberta,
        "@rows": rows,
        "@text": os.path.dirname(rows),
    }
    for name, settings in TEACHERS.items():
        if name in flags:
            folders[name] = teacher(**settings)
    for name, folder in folders.items():
        flags = flags.replace(name, folder)
        pattern = pattern.replace(name, folder)

    refused(pretrain, f"tiny {flags}", pattern)


def test_a_teacher_may_have_more_positions_than_rows_have_tokens(teacher):
    folder = teacher(max_position_embeddings=50)
    config = replace(pretrain.TINY, model="distilbert", teacher=folder)

    data = pretrain.open_data(config)

    theirs = data.teacher.base_model.embeddings.position_embeddings.weight
    ours = data.model.base_model.embeddings.position_embeddings.weight
    assert len(theirs) == 50
    assert torch.equal(ours, theirs[:32])


def test_a_students_checkpoint_is_not_its_teachers(mesh, monkeypatch):
    started = []
    monkeypatch.setattr(pretrain, "main", started.append)
    new_student = replace(pretrain.TINY, model="distilbert")
    student = replace(new_student, checkpoint="runs/distilbert-synthetic/export")

    first = pretrain.with_teacher(new_student, mesh)
    second = pretrain.with_teacher(student, mesh)

    assert [config.checkpoint for config in started] == ["", ""]
    assert [config.model for config in started] == ["bert", "bert"]
    assert second.teacher == first.teacher, "the same run is found again"
    assert second.checkpoint == student.checkpoint


def test_a_trials_teacher_depends_on_what_changes_its_numbers(mesh, monkeypatch):
    monkeypatch.setattr(pretrain, "main", lambda config: {})
    config = replace(pretrain.TINY, model="distilbert")
    same_numbers = replace(config, workers=2, layout=Layout(remat=True))
    other_numbers = replace(config, lr=1.0)

    teacher = pretrain.with_teacher(config, mesh).teacher

    assert pretrain.with_teacher(same_numbers, mesh).teacher == teacher
    assert pretrain.with_teacher(other_numbers, mesh).teacher != teacher
    assert pretrain.with_teacher(replace(config, moments="bfloat16"), mesh).teacher != teacher
    # The name that it had before there was --moments.
    assert teacher == "runs/teacher-47a1efaa/export"
