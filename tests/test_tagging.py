"""Tests what is particular to train/tagging.py: the loss, the head, other data, and what make
predict finds with the export, beside transformers' own."""

import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import exported, within
from predicting import answers_before, answers_of
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    pipeline,
)
from trials import TRIALS

from data import entities, tagging
from errors import InputError
from models import encoders, token_classification
from models.encoder_files import Source
from train import predict
from train import tagging as script
from train.common.mesh import Mesh
from train.prediction import entities as prediction

TRIAL = TRIALS["tagging"]
# As the trial's, with punctuation at the ends of words, another case and unlike lengths.
TEXTS = [
    "anna stone works at stone works, near (hill).",
    "Ben saw Fisher Bank.",
    "marsh",
    "the old anna fisher, ben hill and lake group",
]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Lets tests run on plain PyTorch in this process, whose XLA has four devices."""
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")


@pytest.fixture(scope="module")
def export(run_of) -> Path:
    path, *_ = run_of("tagging")
    return Path(path, "export")


@pytest.fixture(scope="module")
def validation() -> tagging.Sentences:
    """What the trial is evaluated on."""
    return tagging.open_splits("synthetic", tagging.Columns()).eval["validation"]


def json_lines(path: Path, sentences: tagging.Sentences) -> Path:
    """Writes sentences as rows; returns the path."""
    lines = []
    for words, tags in zip(sentences.words, sentences.tags, strict=True):
        lines.append(json.dumps({"words": words, "tags": tags}) + "\n")
    path.write_text("".join(lines))
    return path


def theirs(folder: Path, inputs: list, **options) -> list[list[dict]]:
    """Returns what transformers' pipeline finds, in the form of our answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tagger = pipeline("token-classification", model=str(folder), aggregation_strategy="first")
    found = []
    for one in inputs:
        text = one if isinstance(one, str) else " ".join(one)
        answers = []
        (entities_of_one,) = tagger([one], **options)
        for entity in entities_of_one:
            start, end = entity["start"], entity["end"]
            answers.append(
                {
                    "type": entity["entity_group"],
                    "text": text[start:end],
                    "start": start,
                    "end": end,
                    "probability": pytest.approx(float(entity["score"]), abs=1e-5),
                }
            )
        found.append(answers)
    return found


# ---- make predict --------------------------------------------------------------------------------
def test_lines_have_the_entities_of_the_pipeline(export, tmp_path):
    new = tmp_path / "new.txt"
    new.write_text("\n".join(TEXTS) + "\n")

    answers = answers_of(export, new)

    assert [answer["input"] for answer in answers] == TEXTS
    found = [answer["entities"] for answer in answers]
    assert found == theirs(export, TEXTS)
    assert {entity["text"] for entity in found[0]} >= {"anna stone", "stone works", "hill"}


def test_lists_of_words_have_the_entities_of_the_pipeline(export, validation, tmp_path):
    words = validation.words[:40]
    new = json_lines(tmp_path / "new.jsonl", tagging.Sentences(words, validation.tags[:40]))

    answers = answers_of(export, new, text=("words",), batch_size=8)

    assert [answer["input"] for answer in answers] == [" ".join(one) for one in words]
    found = [answer["entities"] for answer in answers]
    assert found == theirs(export, words, is_split_into_words=True)
    assert sum(map(len, found)) > 40


def test_predictions_have_the_f1_of_the_evaluation(export, run_of, validation, tmp_path):
    _, metrics, _ = run_of("tagging")
    new = json_lines(tmp_path / "new.jsonl", validation)
    predicted = []
    for words, answer in zip(
        validation.words, answers_of(export, new, text=("words",)), strict=True
    ):
        first_word = {
            start: number for number, (start, _) in enumerate(prediction.places_of(words))
        }
        tags = ["O"] * len(words)
        for entity in answer["entities"]:
            first = first_word[entity["start"]]
            last = first + entity["text"].count(" ")
            tags[first : last + 1] = [f"B-{entity['type']}"] + [f"I-{entity['type']}"] * (
                last - first
            )
        predicted.append(tags)

    assert entities.score(validation.tags, predicted).overall.f1 == pytest.approx(metrics["f1"])


def test_every_word_of_a_long_text_is_tagged(export, tmp_path):
    """The trial takes 16 tokens."""
    new = tmp_path / "new.txt"
    new.write_text("the anna stone met ben hill " * 12)
    (answer,) = answers_of(export, new)
    found = [(entity["type"], entity["text"]) for entity in answer["entities"]]
    assert found.count(("PER", "anna stone")) + found.count(("PER", "ben hill")) >= 20
    for entity in answer["entities"]:
        assert answer["input"][entity["start"] : entity["end"]] == entity["text"]


def test_columns_of_csv_are_texts(export, tmp_path):
    new = tmp_path / "new.csv"
    new.write_text("id,text\n1,anna stone\n2,\n3,hill\n")
    answers = answers_of(export, new, text=("text",), skip_broken=True)
    assert [entity["text"] for entity in answers[0]["entities"]] == ["anna stone"]
    assert answers[1] == {"input": "", "error": "its text is empty"}
    assert answers[2]["input"] == "hill"


REFUSED = [
    ("new.jsonl", '{"tokens": ["anna", 1]}\n', {}, "line 1: its tokens is no list of words"),
    ("new.jsonl", '{"tokens": []}\n', {}, "line 1: its tokens is no list of words"),
    ("new.jsonl", '{"text": "anna"}\n', {}, "has no column tokens; it has the columns text"),
    ("eng.testb", "anna B-PER\n", {}, "eng.testb has a word a line, by its name.*--evaluate"),
    ("new.txt", "anna\n", {"text": ("text",)}, "--text is text, and .*new.txt has no columns"),
    ("new.csv", "a,b\n", {"text": ("a", "b")}, "--text is a b; give one column"),
    ("new.txt", "anna\n", {"image_size": 64}, "--image-size is 64; it is for pictures"),
    ("new.txt", "anna\n", {"max_length": 99}, "--max-length is 99; .* at most 16 tokens"),
]


@pytest.mark.parametrize(("name", "text", "flags", "pattern"), REFUSED)
def test_inputs_that_are_refused(name, text, flags, pattern, export, tmp_path):
    new = tmp_path / name
    new.write_text(text)
    answers, error = answers_before(export, new, **flags)
    assert answers == []
    assert re.search(pattern, error), error


def test_a_tagger_has_no_test_sets_of_glue(export):
    with pytest.raises(InputError, match="--task is mrpc, and .* is no model of sentences"):
        predict.open_model(predict.Config(model_dir=str(export), task="mrpc", out="x"))


def test_taggers_from_elsewhere_predict(export, tmp_path):
    """Without columns.json, and with names of classes that have no prefix."""
    folder = tmp_path / "theirs"
    shutil.copytree(export, folder)
    (folder / script.COLUMNS).unlink()
    config = json.loads((folder / "config.json").read_text())
    names = {0: "O", 1: "LOC", 2: "LOC", 3: "ORG", 4: "ORG", 5: "PER", 6: "PER"}
    config["id2label"] = names
    config["label2id"] = {name: number for number, name in names.items()}
    (folder / "config.json").write_text(json.dumps(config))
    new = tmp_path / "new.txt"
    new.write_text(TEXTS[0])

    (answer,) = answers_of(folder, new)

    assert [answer["entities"]] == theirs(folder, TEXTS[:1])
    assert answer["entities"][0]["text"] == "anna stone"


@pytest.mark.parametrize("content", ["{", "[]", '{"max_length": "x", "precision": "float32"}'])
def test_an_export_with_damaged_columns_is_refused(content, export, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(export, folder)
    (folder / script.COLUMNS).write_text(content)
    with pytest.raises(InputError, match="columns.json is damaged.*copy the export again"):
        answers_of(folder, tmp_path / "new.txt")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"Berlin", (near U.S.): Coca-Cola...', '" Berlin " , ( near U.S . ) : Coca-Cola . . .'),
        ("他在北京 ok", "他 在 北 京 ok"),
        ("हिन्दी $5 --", "हिन्दी $ 5 - -"),
        ("  ", ""),
    ],
)
def test_words_of_a_text_are_those_of_a_corpus(text, words):
    found = [text[start:end] for start, end in prediction.split_words(text)]
    assert found == words.split()


# ---- other data ----------------------------------------------------------------------------------
def test_a_run_is_evaluated_on_a_file(run_of, validation, tmp_path):
    path, metrics, _ = run_of("tagging")
    file = json_lines(tmp_path / "other.jsonl", validation)

    found = script.main(
        script.Config(evaluate=path, data=str(file), words="words", tags="tags", device="cpu")
    )

    assert found == pytest.approx(metrics, abs=1e-4)


def test_an_evaluation_refuses_a_type_it_does_not_know(run_of, tmp_path):
    path, *_ = run_of("tagging")
    file = json_lines(tmp_path / "other.jsonl", tagging.Sentences([["Mars"]], [["B-PLANET"]]))
    pattern = "other.jsonl line 1, word 1 has an entity of the type PLANET.*LOC, ORG, PER"
    with pytest.raises(InputError, match=pattern):
        script.main(
            script.Config(evaluate=path, data=str(file), words="words", tags="tags", device="cpu")
        )


@pytest.fixture
def columns(tmp_path, validation) -> Path:
    """A folder of columns in IOB1, as the original CoNLL-2003's; one sentence is long."""
    folder = tmp_path / "conll"
    folder.mkdir()
    for name, chosen in (("eng.train", slice(0, 64)), ("eng.testa", slice(64, 96))):
        lines = ["-DOCSTART- O\n\n"]
        for words, tags in zip(validation.words[chosen], validation.tags[chosen], strict=True):
            for word, tag in zip(words, tags, strict=True):
                lines.append(f"{word} {tag.replace('B-', 'I-')}\n")
            lines.append("\n")
        lines += ["anna I-PER\n", *["old O\n"] * 20, "stone I-LOC\n"]
        (folder / name).write_text("".join(lines))
    return folder


def test_files_of_columns_are_trained_on(columns, tmp_path, capsys):
    config = script.Config(
        data=str(columns),
        checkpoint="new",
        lengths=(16,),
        batch_size=16,
        update_every=2,
        epochs=1,
        precision="float32",
        device="cpu",
        workers=0,
        runs=str(tmp_path),
        name="run",
        best="f1",
    )

    metrics = script.main(config)

    names = ["f1", "precision", "recall", "accuracy", "f1_LOC", "f1_ORG", "f1_PER", "loss"]
    assert list(metrics) == names
    output = capsys.readouterr().out
    assert "bert on conll: 3 types of entities (LOC, ORG, PER), 65 sentences (1 of them" in output
    assert "trained on eng.train, evaluated on eng.testa" in output
    assert "eng.testa: its tags are IOB1 and are converted to IOB2" in output
    assert "eng.train: 1 sentences are longer than 16 tokens" in output
    assert "new weights: 2 layers" in output
    again = script.main(script.Config(evaluate=str(tmp_path / "run"), device="cpu"))
    assert again == pytest.approx(metrics)


def test_an_evaluation_without_entities_is_refused(columns, refused):
    (columns / "eng.testa").write_text("the O\n")
    flags = f"full --checkpoint new --lengths 16 --device cpu --data {columns}"
    refused(script, flags, "conll's split validation has no entities, all its tags are O")


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--labels O,B-X --checkpoint EXPORT", "--labels is O,B-X; expected O,B-LOC,I-LOC,"),
        ("--labels O,B-X", "--labels is O,B-X; it is for the head of a --checkpoint"),
        ("--checkpoint EXPORT --lengths 16 40", "--lengths go up to 40.*16 positions"),
        ("--word-column 0", "--word-column is 0; it must be at least 1"),
        ("--tag-column -1", "--tag-column is -1; it must be at least 0"),
        ("--lengths 32 16", "must rise"),
    ],
)
def test_values_that_are_refused(flags, pattern, export, refused):
    refused(script, f"tiny --device cpu {flags.replace('EXPORT', str(export))}", pattern)


# ---- the model -----------------------------------------------------------------------------------
CPU = Mesh(torch.device("cpu"), None, 1, 0, 1, "CPU", "float32", True)
SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
LABELS = ("O", "B-PER", "I-PER")


def test_the_loss_is_that_of_transformers():
    torch.manual_seed(1)
    model = BertForTokenClassification(BertConfig(**SMALL, num_labels=3)).eval()
    labels = torch.tensor([[-100, 0, 1, -100, 2], [-100, 1, -100, -100, -100]])
    batch = {
        "input_ids": torch.randint(1, 40, (2, 5)),
        "attention_mask": torch.ones(2, 5, dtype=torch.long),
        "token_type_ids": torch.zeros(2, 5, dtype=torch.long),
        "labels": labels,
    }

    sums = script.forward(script.State(model, None), batch, script.TINY, CPU)

    assert sums["words"] == 4
    assert (sums["loss"] / sums["words"]).item() == pytest.approx(model(**batch).loss.item())


def saved(folder: Path, model_class: type, labels: tuple[str, ...] = ()) -> Source:
    """Writes a small model; returns where its weights are."""
    settings = BertConfig(**SMALL)
    if labels:
        settings.num_labels = len(labels)
        settings.id2label = dict(enumerate(labels))
        settings.label2id = {name: number for number, name in enumerate(labels)}
    model_class(settings).save_pretrained(folder)
    return Source(str(folder))


def opened(source: Source):
    """Returns the tagger of a checkpoint."""
    return token_classification.tagger(AutoConfig.from_pretrained(source.folder), LABELS, source)


def test_the_head_of_a_tagger_is_kept_by_its_names(tmp_path):
    source = saved(tmp_path, BertForTokenClassification, ("I-PER", "O", "B-PER"))
    found = opened(source)
    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path).classifier.weight
    assert not found.head.is_new
    assert torch.equal(found.model.classifier.weight, theirs[[1, 2, 0]])
    assert found.model.config.id2label == dict(enumerate(LABELS))


@pytest.mark.parametrize(
    ("model_class", "labels", "why"),
    [
        (BertForTokenClassification, ("O", "B-LOC", "I-LOC"), "classes O, B-LOC, I-LOC"),
        (BertForTokenClassification, ("O", "B-PER"), "one of 2 outputs, and 3 are needed"),
        (BertForSequenceClassification, LABELS, "the head of a BertForSequenceClassification"),
        (BertForMaskedLM, (), "has none"),
    ],
)
def test_another_head_is_new_and_it_is_said(model_class, labels, why, tmp_path):
    found = opened(saved(tmp_path, model_class, labels))
    assert found.head.is_new
    assert why in found.head.message


def test_the_recipe_is_that_of_tagging_where_there_is_one():
    bert = script.with_recipe(script.Config())
    assert (bert.lr, bert.batch_size, bert.epochs) == (5e-5, 32, 4)
    assert script.recipe_of(script.Config()).checkpoint == "google-bert/bert-base-cased"
    roberta = script.recipe_of(script.Config(model="roberta"))
    assert roberta == encoders.by_name("roberta").fine_tuning
    assert script.recipe_of(script.Config(model="auto")).checkpoint == ""


def test_a_recipe_of_another_task_is_said():
    said = "no recipe of tagging is published for roberta: .* fine-tuning on sentences"
    assert re.search(said, script.describe_recipe(script.Config(model="roberta", data="conll")))
    assert script.describe_recipe(script.Config(data="conll")) == ""
    assert script.describe_recipe(script.Config(model="roberta", checkpoint="new")) == ""


def test_the_model_card_names_the_pipeline(export):
    assert "\npipeline_tag: token-classification\n" in (export / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["distilbert", "roberta", "xlnet"])
def test_other_encoders_learn(model, tmp_path):
    config = replace(TRIAL.learns, model=model, epochs=4, runs=str(tmp_path))
    metrics = script.main(replace(config, name="run"))
    assert within(metrics, TRIAL.learned), metrics
    assert exported(tmp_path / "run")
