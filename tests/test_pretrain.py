"""What is particular to train/pretrain.py: every objective is learned, parts of a batch give the numbers of the whole,
and the export loads in transformers, fairseq and train.glue. The rest is in test_scripts.py."""

import copy
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from eager_runs import without_dropout
from helpers import assert_graph_contract, equal, exported, losses, records
from timm.optim import Lamb
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer, BertConfig, pipeline
from trials import TRIALS

from data import pretraining
from data.prepare import text as prepare_text
from models import encoders, objectives
from train import glue, pretrain
from train.common import accumulate, loading
from train.common.mesh import Layout
from train.common.xla import backend as xla

LEARNS, SHORT = TRIALS["pretrain"].learns, TRIALS["pretrain"].short


@pytest.fixture(scope="module")
def fairseq(tmp_path_factory):
    """A RoBERTa in fairseq's format that has learned something; as `trained`."""
    config = replace(LEARNS, model="fairseq-roberta", steps=60, runs=str(tmp_path_factory.mktemp("runs")), name="run")
    return f"{config.runs}/run", pretrain.main(config), config


def guess(config) -> float:
    """Accuracy of always naming the commonest token."""
    valid_set = pretrain.open_data(pretrain.validate(config)).eval
    batch = loading.as_tensors([valid_set.example(row, np.random.default_rng(row)) for row in range(len(valid_set))])
    return batch["labels"][batch["weights"] > 0].bincount().max().item() / batch["weights"].sum().item()


@pytest.mark.slow
def test_fairseqs_roberta_learns_what_its_twin_does(fairseq, tmp_path):
    path, metrics, config = fairseq
    assert losses(path)[0] > 5.5
    assert metrics["loss"] < 3.8 and metrics["accuracy"] > 0.15
    assert pretrain.main(replace(config, model="roberta", runs=str(tmp_path))) == metrics
    assert not os.path.exists(tmp_path / "run/export/fairseq")
    assert equal(exported(tmp_path / "run"), exported(path))


def test_a_permutation_is_learned(tmp_path):
    config = replace(LEARNS, model="xlnet", steps=60, warmup_steps=20, precision="bfloat16", runs=str(tmp_path))
    before = xla.compilations()
    metrics = pretrain.main(replace(config, name="run"))
    assert losses(tmp_path / "run")[0] > 4.5
    assert metrics["loss"] < 3.6 and metrics["accuracy"] > 1.5 * guess(config)
    assert_graph_contract(tmp_path / "run")
    assert xla.compilations() - before <= 4
    model = AutoModelForPreTraining.from_pretrained(tmp_path / "run/export")
    assert type(model).__name__ == "XLNetLMHeadModel"


def test_a_student_learns_of_the_teacher_that_another_run_exported(trained, tmp_path):
    config = replace(LEARNS, model="distilbert", teacher=f"{trained[0]}/export", steps=30, warmup_steps=5, lr=1e-3)
    config = replace(config, precision="bfloat16", runs=str(tmp_path))
    metrics = pretrain.main(replace(config, name="run"))
    lines = [record for record in records(tmp_path / "run") if "soft" in record]
    # It begins with a layer of its teacher, which is worth something.
    assert trained[1]["loss"] < metrics["loss"] < lines[0]["words"] - 0.2 < 4.2
    assert lines[-1]["soft"] < 0.6 * lines[0]["soft"] and lines[-1]["cosine"] < 0.8 * lines[0]["cosine"]
    assert_graph_contract(tmp_path / "run")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run/export")
    assert type(model).__name__ == "DistilBertForMaskedLM" and model.config.n_layers == 1


@pytest.mark.slow
def test_the_next_sentence_whole_words_lamb_and_parts_of_a_batch_together(tmp_path):
    config = replace(SHORT, next_sentence=True, whole_words=True, optimizer="lamb", update_every=2, lr=0.02, steps=12)
    metrics = pretrain.main(replace(config, precision="bfloat16", runs=str(tmp_path), name="run"))
    assert 0.3 < metrics["next_sentence_accuracy"] < 1
    found = losses(tmp_path / "run")
    assert len(found) == 12 and found[0] > 5.3 and found[-1] < found[0] - 0.5  # log(116 words) + log(2)
    assert_graph_contract(tmp_path / "run")
    _, loaded = AutoModelForPreTraining.from_pretrained(tmp_path / "run/export", output_loading_info=True)
    assert "cls.seq_relationship.weight" in exported(tmp_path / "run") and not loaded["missing_keys"]


def test_an_update_of_unequal_parts_is_that_of_their_rows_in_one_batch_clipped(mesh, monkeypatch):
    """On the host, with plain gradient descent."""
    whole_config, config = pretrain.TINY, replace(pretrain.TINY, update_every=2)
    clipped = replace(encoders.by_name("bert").pretraining, clip=0.125)
    monkeypatch.setattr(pretrain, "recipe_of", lambda config: clipped)
    data = pretrain.open_data(config)
    batch = loading.as_tensors([data.train.example(row, np.random.default_rng(row)) for row in range(8)])
    batch["weights"][:4, 1:] = 0
    parts = [{name: values[rows] for name, values in batch.items()} for rows in (slice(0, 4), slice(4, 8))]
    counts = [objectives.counts(part) for part in parts]
    assert counts[1]["predicted"].sum() > 2 * counts[0]["predicted"].sum()
    new = data.model.eval()  # no dropout
    one, two = copy.deepcopy(new), copy.deepcopy(new)
    states = [pretrain.State(model, None, torch.optim.SGD(model.parameters(), 1.0)) for model in (one, two)]
    whole = pretrain.train_step(states[0], batch, whole_config, mesh)
    totals = {"loss": torch.zeros(()), "words": torch.zeros(())}
    for part in parts:
        part |= {name: counts[0][name] + counts[1][name] for name in counts[0]}
        accumulate.gradient_step(pretrain.forward, states[1], part, totals, config, mesh)
    found = accumulate.update_step(pretrain.update, states[1], totals, config, "")
    torch.testing.assert_close(found, whole)
    assert whole["loss"] == whole["words"] > 4
    assert totals["loss"] == 0 and not any(parameter.grad.any() for parameter in two.parameters())
    weights = [torch.nn.utils.parameters_to_vector(model.parameters()) for model in (new, one, two)]
    moves = [weights[0] - other for other in weights[1:]]
    torch.testing.assert_close(*moves, rtol=1e-4, atol=1e-6)
    assert moves[0].norm().item() == pytest.approx(0.125, rel=1e-4)


def test_parts_of_a_batch_give_the_numbers_of_all_of_it(tmp_path, monkeypatch):
    """Eight parts of four rows, one on each device; the rows have unequal numbers of predicted tokens."""
    monkeypatch.setattr(encoders, "new_configuration", encoders.new_configuration)  # which is replaced here
    without_dropout(encoders)
    config = replace(SHORT, next_sentence=True, steps=3, warmup_steps=2, eval_every=3, runs=str(tmp_path))
    whole = pretrain.main(replace(config, name="one"))
    parts = pretrain.main(replace(config, name="two", update_every=8))
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-5) and max(one) - min(one) > 0.1
    assert parts == pytest.approx(whole, rel=1e-4)
    # A weight moves by up to 7e-3 here; where its gradient is rounding alone, Adam makes steps of that.
    torch.testing.assert_close(exported(tmp_path / "two"), exported(tmp_path / "one"), rtol=0, atol=1e-3)


def test_a_models_recipe_fills_what_is_not_given_and_is_its_optimizers(mesh):
    config = pretrain.validate(pretrain.Config(model="roberta", data="somewhere", lr=1.0))
    assert (config.batch_size, config.steps, config.lr, config.warmup_steps) == (8192, 500_000, 1.0, 24_000)
    assert pretrain.validate(pretrain.Config(data="somewhere")).batch_size == 256
    sized = [("bert", "large", (256, 1e-4)), ("roberta", "large", (8192, 4e-4)), ("xlnet", "large", (8192, 4e-4))]
    for model, size, expected in [*sized, ("fairseq-roberta", "1.3b", (1024, 1e-4))]:
        config = pretrain.validate(pretrain.Config(model=model, size=size, data="somewhere"))
        assert (config.batch_size, config.lr) == expected
    for name in encoders.PRETRAINED:
        recipe = encoders.by_name(name).pretraining
        config = replace(pretrain.TINY, model=name)
        data = pretrain.open_data(replace(config, model="bert") if name == "distilbert" else config)
        decayed, spared = pretrain.build(config, data, mesh).optimizer.param_groups
        assert (decayed["weight_decay"], spared["weight_decay"]) == (recipe.weight_decay, 0.0)
        assert decayed["betas"] == (0.9, recipe.beta2) and decayed["eps"] == 1e-6
    config = replace(pretrain.TINY, optimizer="lamb")
    optimizer = pretrain.build(config, pretrain.open_data(config), mesh).optimizer
    assert isinstance(optimizer, Lamb) and optimizer.defaults["max_grad_norm"] is None


@pytest.mark.parametrize(("kind", "length", "expected"), [("bert", 128, 21), ("bert", 512, 82), ("xlnet", 512, 88)])
def test_places_for_predictions(kind, length, expected):
    for predictions, places in ((0, expected), (7, 7)):
        rows = pretraining.open_rows("synthetic", "valid", kind, predictions, False, False, (length, 0))
        assert rows.predictions == places


def test_transformers_loads_the_export_and_finds_the_metrics_of_the_run(trained, mesh):
    path, metrics, config = trained
    model = AutoModelForMaskedLM.from_pretrained(f"{path}/export").eval()
    valid_set = pretrain.open_data(config).eval
    with loading.parallel_loader(valid_set, len(valid_set), mesh, train=False, seed=config.seed, workers=0) as loader:
        (batch,) = [{name: value.cpu() for name, value in batch.items()} for batch in loader]
    assert batch["mask"].all()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    rows, places = torch.nonzero(batch["weights"], as_tuple=True)
    logits, labels = logits[rows, batch["positions"][rows, places].long()], batch["labels"][rows, places].long()
    found = (
        torch.nn.functional.cross_entropy(logits, labels).item(),
        (logits.argmax(-1) == labels).float().mean().item(),
    )
    assert found == pytest.approx((metrics["loss"], metrics["accuracy"]), rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(f"{path}/export")
    assert tokenizer.get_vocab() == valid_set.text.tokenizer.get_vocab()
    # A word has the number after that of the word before it, see data/text.py.
    fill = pipeline("fill-mask", model=f"{path}/export", tokenizer=f"{path}/export")
    assert {"token_str", "score"} <= set(fill("bano [MASK] bara base.")[0])


@pytest.mark.parametrize("of", ["trained", "fairseq"])
def test_pretraining_goes_on_from_an_export(of, tmp_path, request):
    path, metrics, config = request.getfixturevalue(of)
    folder = f"{path}/export" + ("/fairseq" if of == "fairseq" else "")
    config = replace(config, checkpoint=folder, lr=0.0, steps=2, runs=str(tmp_path), name="on")
    assert pretrain.main(config) == pytest.approx(metrics, rel=1e-5)
    assert losses(tmp_path / "on")[0] < metrics["loss"] + 0.5
    if of == "trained":
        assert equal(exported(tmp_path / "on"), exported(path))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    """A folder of rows, beside the text that they are made from: five judgements a document, good or bad."""
    folder, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    words = (("awful", "dull", "poor", "grim"), ("fine", "lovely", "great", "bright"))
    judgements = [(rng.choice(["film", "plot", "cast", "song"]), *rng.choice(words[n % 2], 2)) for n in range(750)]
    lines = ["The {} was {} and also {}.".format(*judgement) for judgement in judgements]
    text = "\n\n".join("\n".join(lines[i : i + 5]) for i in range(0, len(lines), 5))
    (folder / "all.txt").write_text(text + "\n")
    options = "--kind bert --length 32 --vocab-size 116 --valid-share 0.2 --workers 1"
    prepare_text.main(["--data", f"{folder}/all.txt", "--out", f"{folder}/rows", *options.split()])
    return str(folder / "rows")


def test_a_prepared_text_is_learned_and_fine_tuning_begins_with_the_export(rows, tmp_path):
    metrics = pretrain.main(replace(LEARNS, data=rows, steps=40, warmup_steps=10, runs=str(tmp_path), name="run"))
    assert losses(tmp_path / "run")[0] > 3.5 > 2.5 > metrics["loss"]
    fine = glue.validate(replace(glue.TINY, lengths=(24,), checkpoint=f"{tmp_path}/run/export"))
    model = glue.open_data(fine).model
    weights = {name: value for name, value in exported(tmp_path / "run").items() if name.startswith("bert.")}
    assert len(weights) > 10 and all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())


@pytest.fixture
def teacher(trained, tmp_path):
    """Writes a new BERT with the tokens of the small language: teacher(hidden_size=96)."""

    def write(**settings) -> str:
        made = BertConfig.from_pretrained(f"{trained[0]}/export", **settings)
        shutil.copytree(f"{trained[0]}/export", tmp_path / "teacher")
        AutoModelForMaskedLM.from_config(made).save_pretrained(tmp_path / "teacher")
        return str(tmp_path / "teacher")

    return write


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
def test_values_that_are_refused(refused, trained, fairseq, rows, teacher, flags, pattern):
    settings = {"@short": {"max_position_embeddings": 31}, "@wide": {"hidden_size": 96}, "@words": {"vocab_size": 128}}
    settings |= {"@flat": {"num_hidden_layers": 0}}
    folders = {name: teacher(**changed) for name, changed in settings.items() if name in flags}
    folders |= {"@bert": f"{trained[0]}/export", "@roberta": f"{fairseq[0]}/export", "@rows": rows}
    for name, folder in {**folders, "@text": os.path.dirname(rows)}.items():
        flags, pattern = flags.replace(name, folder), pattern.replace(name, folder)
    refused(pretrain, f"tiny {flags}", pattern)


def test_a_teacher_may_have_more_positions_than_rows_have_tokens(teacher):
    config = replace(pretrain.TINY, model="distilbert", teacher=teacher(max_position_embeddings=50))
    data = pretrain.open_data(config)
    theirs, ours = (one.base_model.embeddings.position_embeddings.weight for one in (data.teacher, data.model))
    assert len(theirs) == 50 and torch.equal(ours, theirs[:32])


def test_a_trials_teacher_is_the_same_whatever_changes_no_number(mesh, monkeypatch):
    monkeypatch.setattr(pretrain, "main", lambda config: {})
    config = replace(pretrain.TINY, model="distilbert")
    changes = {}, {"workers": 2, "layout": Layout(remat=True)}, {"lr": 1.0}
    first, free, other = (pretrain.with_teacher(replace(config, **change), mesh).teacher for change in changes)
    assert first == free != other
