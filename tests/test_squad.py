"""train/squad.py: what only it does; what all scripts do is in test_scripts.py."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import squad_reference
import torch
from helpers import within
from model_helpers import randomized
from predicting import answers_before, answers_of, write_classifier
from trials import TRIALS

from data import squad as data_squad
from data import squad_answers, vocabulary
from errors import InputError
from models import encoder_files, encoder_layers, encoders
from models import question_answering as spans
from train import squad

GOLDEN = json.loads(Path(__file__).with_name("squad_golden.json").read_text())
ENCODERS = ("bert", "distilbert", "roberta", "xlnet")


@pytest.fixture
def plain(monkeypatch) -> None:
    """Lets a script run in plain PyTorch, which takes one device."""
    monkeypatch.delenv("CPU_NUM_DEVICES")


# ---- the model -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ENCODERS)
def test_logits_and_loss_are_those_of_transformers(name, mesh):
    opened = data_squad.open_splits("synthetic")
    lines = [f"{row.text} {row.context}" for row in opened.train.rows[:200]]
    tokenizer = vocabulary.learn(lines, encoders.by_name(name).tokenizer, 400, repeatable=True)
    settings = encoders.new_configuration(name, "tiny", tokenizer, 48)
    model = randomized(spans.span_model(settings, source=None).model)
    limits = data_squad.Limits(max_length=48, stride=12, max_question=12)
    windows = data_squad.Windows(data_squad.Questions(opened.train.rows[:8]), tokenizer, limits)
    examples = [windows.example(index, None) for index in range(8)]
    batch = {key: torch.from_numpy(np.stack([one[key] for one in examples])) for key in examples[0]}

    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if name in ("bert", "xlnet"):
        inputs["token_type_ids"] = batch["token_type_ids"]
    start = batch["start"].long()
    end = batch["end"].long()
    with torch.no_grad():
        expected = model(**inputs, start_positions=start, end_positions=end)
        logits = spans.compute_logits(encoder_layers.fast_layers(model), batch)
        losses = spans.compute_losses(logits, batch["start"], batch["end"])

    torch.testing.assert_close(logits[:, 0], expected.start_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[:, 1], expected.end_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses.mean(), expected.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS[1:])
def test_other_models_learn(name, tmp_path, plain):
    config = replace(TRIALS["squad"].learns, model=name, epochs=16, device="cpu")
    metrics = squad.main(replace(config, version="1.1", runs=str(tmp_path)))
    assert within(metrics, {"f1": (0.6, 1.0)}), metrics


def test_an_encoder_without_such_a_head_is_refused():
    from transformers import SplinterConfig

    with pytest.raises(InputError, match="SplinterForQuestionAnswering has no layer qa_outputs"):
        spans.span_model(SplinterConfig(num_hidden_layers=1, vocab_size=99), source=None)


# ---- recipes -------------------------------------------------------------------------------------
def recipe(model: str, data: str) -> tuple:
    """Returns the learning rate, batch, epochs, tokens and Adam's beta2 of a recipe."""
    config = squad.validate(squad.Config(model=model, data=data))
    numbers = (config.lr, config.batch_size, config.epochs, config.max_length)
    return (*numbers, squad.recipe_of(config).beta2)


@pytest.mark.parametrize(
    "model, data, expected",
    [
        # Devlin et al. 2019, 4.2 and 4.3
        ("bert", "rajpurkar/squad", (5e-5, 32, 3, 384, 0.999)),
        ("bert", "rajpurkar/squad_v2", (5e-5, 48, 2, 384, 0.999)),
        ("distilbert", "rajpurkar/squad", (5e-5, 32, 3, 384, 0.999)),
        ("roberta", "rajpurkar/squad", (1.5e-5, 48, 2, 384, 0.98)),  # Liu et al. 2019, table 10
        # zihangdai/xlnet: 8,000 updates of 48, of 130,319 questions
        ("xlnet", "rajpurkar/squad_v2", (3e-5, 48, pytest.approx(2.947, abs=1e-3), 512, 0.999)),
    ],
)
def test_what_is_not_given_is_the_models_recipe(model, data, expected):
    assert recipe(model, data) == expected


def test_what_is_given_stays_beside_the_models_recipe():
    config = squad.validate(squad.Config(data="rajpurkar/squad", lr=1e-3, max_length=200))
    assert (config.lr, config.max_length, config.batch_size) == (1e-3, 200, 32)


# ---- the export ----------------------------------------------------------------------------------
def asked(path: Path, questions: data_squad.Questions) -> str:
    """Writes questions, without their answers, in SQuAD's format; returns the path."""
    paragraphs = []
    for row in questions.rows:
        qas = [{"id": row.name, "question": row.text}]
        paragraphs.append({"context": row.context, "qas": qas})
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return str(path)


def test_predictions_have_the_metrics_of_the_run(trained, tmp_path, plain):
    path, metrics, config = trained
    questions = data_squad.open_splits("synthetic", config.version, config.seed).eval["valid"]

    answers = answers_of(f"{path}/export", asked(tmp_path / "new.json", questions))

    assert [one["input"]["id"] for one in answers] == [row.name for row in questions.rows]
    found = []
    for row, one in zip(questions.rows, answers, strict=True):
        assert row.context[one["start"] : one["end"]] == one["answer"]
        text = one["answer"] or next(each["answer"] for each in one["n_best"] if each["answer"])
        best = squad_answers.Candidate(text, one["start"], one["end"], np.float32(0), 0.0)
        answer = best if one["answer"] else squad_answers.NOTHING
        found.append(squad_answers.Found(answer, best, one["null_difference"], []))
    scored = squad_answers.score(questions, found, may_be_none=True)
    assert len({one["answer"] for one in answers}) > 30
    for name in ("exact_match", "f1", "no_answer_accuracy", "best_f1"):
        assert scored[name] == pytest.approx(metrics[name], abs=0.006), name  # two questions


def test_transformers_loads_the_export_with_the_runs_loss(trained):
    path, metrics, config = trained
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    model = AutoModelForQuestionAnswering.from_pretrained(f"{path}/export")
    tokenizer = AutoTokenizer.from_pretrained(f"{path}/export")
    questions = data_squad.open_splits("synthetic", config.version, config.seed).eval["valid"]
    windows = data_squad.Windows(questions, tokenizer, squad.window_limits(config))
    examples = [windows.example(index, None) for index in range(len(windows))]
    batch = {key: torch.from_numpy(np.stack([one[key] for one in examples])) for key in examples[0]}

    with torch.no_grad():
        loss = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            token_type_ids=batch["token_type_ids"],
            start_positions=batch["start"].long(),
            end_positions=batch["end"].long(),
        ).loss
    assert loss.item() == pytest.approx(metrics["loss"], rel=1e-4)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> Path:
    """The folder of the small model."""
    folder = tmp_path_factory.mktemp("small") / "model"
    squad_reference.write_model(folder)
    return folder


def test_predictions_are_those_of_the_pipeline(small_model, tmp_path, plain):
    lines = []
    for one in squad_reference.ASKED:
        lines.append(json.dumps({"question": one.question, "context": one.context}))
    data = tmp_path / "new.jsonl"
    data.write_text("\n".join(lines))

    # All pairs of tokens are candidates, as they are to the pipeline.
    folder = shutil.copytree(small_model, tmp_path / "model")
    limits = {"max_length": 48, "stride": 8, "max_question": 12, "n_best": 48, "max_answer": 30}
    others = {"null_threshold": 0.0, "may_be_none": False, "precision": "float32"}
    (folder / "answers.json").write_text(json.dumps(limits | others))

    answers = answers_of(folder, data)
    may_be_none = answers_of(folder, data, null_threshold=0.0, top=60)

    for one, other, expected in zip(answers, may_be_none, GOLDEN["pipeline"], strict=True):
        best = expected["n_best"]
        assert [each["answer"] for each in one["n_best"]] == [text for text, *_ in best]
        places = [(each["start"], each["end"]) for each in one["n_best"]]
        assert places == [(start, end) for _, start, end, _ in best]
        scores = [each["score"] for each in one["n_best"]]
        assert scores == pytest.approx([score for *_, score in best], rel=2e-5)
        assert {"null_difference"} == other.keys() - one.keys()
        by_text = {each["answer"]: each["score"] for each in other["n_best"]}
        assert by_text[""] == pytest.approx(expected["no_answer"], rel=2e-5)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_tables_of_questions_are_answered(kind, small_model, tmp_path, plain):
    data = tmp_path / f"new.{kind}"
    if kind == "csv":
        data.write_text("who,text\nwho is in?,the dog is in the house\nwhat?,\n")
    else:
        rows = [{"who": "who is in?", "text": "the dog is in the house"}, {"who": "what?"}]
        data.write_text("\n".join(map(json.dumps, rows)))

    first, second = answers_of(small_model, data, text=("who", "text"), skip_broken=True, top=2)

    context = "the dog is in the house"
    assert first["input"] == {"question": "who is in?", "context": context}
    assert len(first["n_best"]) == 2
    assert first["answer"] == context[first["start"] : first["end"]] != ""
    assert second["error"] == "its text is empty"


def test_squads_json_is_answered_whatever_its_answers(small_model, tmp_path, plain):
    qas = [
        {"id": "far", "question": "who is in?", "answers": [{"text": "dog", "answer_start": 99}]},
        {"id": "null", "question": "who is in?", "answers": None},
        {"id": "empty", "question": ""},
        {"id": "half", "question": "who \ud83d?"},
    ]
    paragraph = {"context": "the dog is in the house", "qas": qas}
    data = tmp_path / "new.json"
    data.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))

    far, null, empty, half = answers_of(small_model, data, skip_broken=True)

    assert far["answer"] == null["answer"] != ""
    assert empty["error"] == "its question is empty"
    assert half["error"] == "its question is not UTF-8"


def test_long_contexts_are_answered_in_several_pieces(small_model, tmp_path, plain):
    """More questions than a batch, with contexts of several windows."""
    context = " ".join(["the old dog sees a red bird near house."] * 5)
    rows = [{"question": "who is in the house?", "context": context}] * 50
    rows[40] = {"question": "what is red?", "context": "a big red tree is by the river on seven."}
    data = tmp_path / "new.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))

    answers = answers_of(small_model, data, batch_size=8)

    assert len(answers) == 50
    assert answers[0]["answer"]
    for number, one in enumerate(answers):
        if number != 40:
            assert one == answers[0]
    assert answers[40]["input"] == rows[40]
    assert answers[40] != answers[0]


@pytest.mark.parametrize(
    "name, content, flags, reason",
    [
        ("new.txt", "who?", {}, "new.txt has no columns, and a question needs its context"),
        ("new.csv", "question\nwho?", {}, "has no column context"),
        ("unread.csv", "", {"data": "-"}, "the standard input has no columns"),
        ("new.jsonl", "{}", {"text": ("question",)}, "--text is question; give two columns"),
        ("new.json", '{"data": [1]}', {}, "not in SQuAD's format"),
        ("new.csv", "question,context\nwho?,a", {"max_length": 99}, "takes at most 48 tokens"),
        ("new.csv", "question,context\nwho?,", {}, "its context is empty; or pass --skip-broken"),
        ("new.csv", "", {"null_threshold": float("nan")}, "--null-threshold is nan; it must be"),
    ],
    ids=["lines", "column", "input", "text", "format", "long", "empty", "threshold"],
)
def test_what_cannot_be_answered_is_refused(
    name, content, flags, reason, small_model, tmp_path, plain
):
    data = tmp_path / name
    data.write_text(content)
    _, error = answers_before(small_model, **{"data": data} | flags)
    assert reason in error


def test_a_flag_for_answers_is_refused_for_sentences(tmp_path):
    write_classifier(tmp_path / "export", ["good", "bad"])
    data = tmp_path / "new.txt"
    data.write_text("one\n")
    _, error = answers_before(tmp_path / "export", data, null_threshold=1.0)
    assert "--null-threshold is 1.0; it is for answers" in error


# ---- other data and checkpoints ------------------------------------------------------------------
def own_questions(folder: Path, split: str) -> str:
    """Writes synthetic questions in SQuAD's format; returns the path."""
    rows = data_squad.open_splits("synthetic", "2.0").eval["valid"].rows
    rows = rows[:200] if split == "train" else rows[200:]
    paragraphs = []
    for row in rows:
        answers = []
        for text, start in zip(row.answers, row.starts, strict=True):
            answers.append({"text": text, "answer_start": start})
        qa = {"id": row.name, "question": row.text, "answers": answers}
        paragraphs.append({"context": row.context, "qas": [qa]})
    path = folder / f"{split}.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return str(path)


def test_training_on_own_questions_starts_from_an_export(trained, tmp_path, capsys, plain):
    path, _, config = trained
    own_questions(tmp_path, "train")
    own_questions(tmp_path, "dev")
    config = replace(
        config, data=str(tmp_path), checkpoint=f"{path}/export", epochs=0.5, lr=1e-5, warmup=0.0
    )

    metrics = squad.main(replace(config, device="cpu", runs=str(tmp_path), name="own"))

    assert metrics["f1"] > 0.7
    output = capsys.readouterr().out
    assert "on squad: 200 questions (" in output
    assert "(trained on train.json, evaluated on dev.json)" in output
    assert "the head is new" not in output


def test_a_checkpoint_without_a_head_gets_a_new_one(tmp_path):
    write_classifier(tmp_path / "export", ["good", "bad"])
    opened = encoder_files.open_checkpoint(str(tmp_path / "export"), "bert")

    found = spans.span_model(opened.config, opened.source)

    assert found.why_new.endswith("has none that answers questions")
    assert found.model.qa_outputs.weight.shape[0] == 2


def test_another_threshold_is_evaluated_without_training(trained, tmp_path, plain):
    path, metrics, _ = trained
    never = squad.main(squad.Config(evaluate=path, null_threshold=1e6, device="cpu"))
    assert never["no_answer_accuracy"] == 0 < metrics["no_answer_accuracy"]
    assert never["has_answer_f1"] >= metrics["has_answer_f1"]
    assert never["best_f1"] == pytest.approx(metrics["best_f1"], abs=0.006)


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--max-length 20 --stride 10", "--stride 10 must be less"),
        ("--max-length 20 --stride 2 --max-question 8 --null-threshold nan", "must be a number"),
        ("--data rajpurkar/squad --model auto", "--checkpoint is missing: --model auto needs one"),
        ("--split dev", "--split is dev; it is for --evaluate"),
        ("--data own.json --checkpoint new", "--checkpoint is new; from new weights no answers"),
    ],
    ids=["stride", "threshold", "checkpoint", "split", "new"],
)
def test_values_that_are_refused(refused, flags, reason):
    refused(squad, f"tiny {flags}", reason)
