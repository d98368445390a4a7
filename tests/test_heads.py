"""Tests models/heads.py and what stands on it: the head of a checkpoint is kept by the names of its
classes, in any order and case; else it is new, refused or stated.

transformers' and torchvision's own models are the reference.
"""

import copy
import json
import unicodedata
from pathlib import Path

import pytest
import torch
import transformers
from model_helpers import randomized
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from errors import InputError
from models import classification, encoder_files, heads
from models.encoder_files import Source

NLI = ("entailment", "neutral", "contradiction")
THEIRS = ("CONTRADICTION", "Neutral", "entailment")  # as checkpoints of MNLI have it

# Settings of tiny models whose configuration has BERT's names.
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 34,
    "embedding_size": 16,
}
# Settings of the other models, and what these need besides.
OWN_SIZES = {
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    "xlnet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
    "funnel": {
        "block_sizes": [1],
        "num_decoder_layers": 1,
        "d_model": 16,
        "n_head": 2,
        "d_head": 8,
        "d_inner": 16,
    },
    "modernbert": {
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "decoder_bias": True,
    },
    "xlm": {"emb_dim": 16, "n_layers": 1, "n_heads": 2},
    "flaubert": {"emb_dim": 16, "n_layers": 1, "n_heads": 2},
    "bart": {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "eos_token_id": 3,
    },
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
}
UNLIKE_BERT = OWN_SIZES.keys() - {"modernbert"}  # the names of these sizes are not BERT's
ALL_KINDS = [
    "bert",
    "roberta",
    "albert",
    "electra",
    "camembert",
    "xlm-roberta",
    "deberta",
    "deberta-v2",
    "convbert",
    "mobilebert",
    "mpnet",
    "squeezebert",
    "megatron-bert",
    "rembert",
    "roformer",
    "nezha",
    *OWN_SIZES,
]
KINDS = [kind for kind in ALL_KINDS if kind in transformers.CONFIG_MAPPING]


def numbered(names: tuple[str, ...]) -> dict[str, int]:
    """Returns the number of each name, as label2id has it."""
    return {name: number for number, name in enumerate(names)}


def write(
    folder: Path,
    kind: str,
    names: tuple[str, ...] = THEIRS,
    count: int = 3,
    head: type = AutoModelForSequenceClassification,
    **settings,
) -> PreTrainedModel:
    """Writes a new tiny checkpoint with these names of classes; returns its model."""
    sizes = {"vocab_size": 40, "pad_token_id": 1} if kind in UNLIKE_BERT else SIZES
    sizes = sizes | OWN_SIZES.get(kind, {}) | settings
    config = AutoConfig.for_model(kind, **sizes)
    config.num_labels = count
    if names:
        config.id2label = dict(enumerate(names))
        config.label2id = numbered(names)
    model = randomized(head.from_config(config))
    model.save_pretrained(folder)
    return model


def write_without_head(folder: Path) -> None:
    """Writes a BERT that predicts words."""
    write(folder, "bert", (), head=transformers.AutoModelForMaskedLM)


def write_label2id(folder: Path, label2id: dict[str, int | str]) -> None:
    """Changes that table alone in the configuration of a checkpoint."""
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["label2id"] = label2id
    path.write_text(json.dumps(settings))


def opened(folder: Path, labels=NLI, stated=()) -> classification.Classifier:
    """Opens a checkpoint for the classes `labels`."""
    settings = AutoConfig.from_pretrained(folder)
    return classification.classifier(settings, labels, Source(str(folder)), stated)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    ids = torch.tensor([[2, 5, 9, 30, 3], [2, 8, 7, 7, 3]])
    return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


# Names that are the data's


@pytest.mark.parametrize("kind", KINDS)
def test_rows_follow_the_names_in_every_architecture(kind, tmp_path):
    """Whatever the last layer is called: classifier, out_proj, logits_proj, score …; with a bias or
    without."""
    theirs = write(tmp_path, kind)

    found = opened(tmp_path)

    their_logits = logits(theirs)
    assert (their_logits[:, 0] - their_logits[:, 2]).abs().min() > 1e-6
    expected = their_logits[:, [2, 1, 0]]
    torch.testing.assert_close(logits(found.model), expected)
    assert found.head.rows == [2, 1, 0]
    assert not found.head.refusal_at_lr_0
    assert "order CONTRADICTION, Neutral, entailment" in found.head.message
    assert found.model.config.id2label == dict(enumerate(NLI))

    # What is saved has the data's order.
    found.model.save_pretrained(tmp_path / "again")
    again = opened(tmp_path / "again")
    assert again.head == heads.HeadDecision([0, 1, 2])
    torch.testing.assert_close(logits(again.model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("numbers", [(0, 1, 2), ("0", "1", "2")])
def test_names_that_stand_in_label2id_alone_decide_too(numbers, tmp_path):
    """As where somebody has set model.config.label2id and forgotten the other."""
    theirs = write(tmp_path, "bert", ())
    write_label2id(tmp_path, dict(zip(THEIRS, numbers, strict=True)))
    assert AutoConfig.from_pretrained(tmp_path).id2label[0] == "LABEL_0"

    found = opened(tmp_path)
    stated = opened(tmp_path, stated=("neutral", "entailment", "contradiction"))

    assert found.head.rows == [2, 1, 0]
    assert not found.head.refusal_at_lr_0
    torch.testing.assert_close(logits(found.model), logits(theirs)[:, [2, 1, 0]])
    assert stated.head.rows == [1, 0, 2]


@pytest.fixture
def contradictory(tmp_path) -> Path:
    """Writes a checkpoint whose label2id has another order than its id2label."""
    write(tmp_path, "bert", NLI)
    write_label2id(tmp_path, numbered(THEIRS))
    return tmp_path


def test_two_tables_that_contradict_each_other_are_refused(contradictory):
    message = "entailment, neutral, contradiction by its id2label, .*label2id; state"

    with pytest.raises(InputError, match=message):
        opened(contradictory)


def test_a_stated_order_decides_between_two_tables(contradictory):
    assert opened(contradictory, stated=THEIRS).head.rows == [2, 1, 0]


def test_names_match_in_any_order_case_and_form():
    composed = unicodedata.normalize("NFC", "Café")
    decomposed = unicodedata.normalize("NFD", "Café")
    theirs = [decomposed, "not-entailment", " X "]
    ours = ["x", composed.lower(), "not entailment"]

    assert heads.match(theirs, ours) == [2, 0, 1]


def test_names_that_differ_in_case_alone_match_exactly():
    assert heads.match(["Cat", "cat"], ["cat", "Cat"]) == [1, 0]
    assert heads.match(["Cat", "cat"], ["cat", "CAT"]) is None


def test_names_that_lack_one_or_are_not_distinct_do_not_match():
    assert heads.match(["a", "b"], ["a", "b", "c"]) is None
    assert heads.match(["a", "a"], ["a", "a"]) is None


def test_the_datas_own_names_may_be_numbers():
    assert heads.match(["1", "0"], ["0", "1"]) == [1, 0]


# Heads that are new


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlnet", "gpt2"])
def test_a_head_for_other_classes_is_new_and_nothing_else(kind, tmp_path):
    theirs = write(tmp_path, kind, ("yes", "no", "maybe"))
    before = copy.deepcopy(theirs.state_dict())

    found = opened(tmp_path)

    assert found.head.rows is None
    assert found.head.message.startswith("the head is new: ")
    assert "yes, no, maybe" in found.head.message
    assert "entailment, neutral, contradiction" in found.head.message
    assert "--labels" in found.head.message
    assert "--lr 0" in found.head.refusal_at_lr_0
    changed = set()
    for name, value in found.model.state_dict().items():
        if not torch.equal(value, before[name]):
            changed.add(name)
    assert changed == set(classification._label_dims(found.model))
    for name in changed:
        spread = found.model.state_dict()[name].std().item()
        if name.endswith("weight"):
            assert 0.01 < spread < 0.04
        else:
            assert spread == 0


@pytest.mark.parametrize("checkpoint", ["without a head", "five classes"])
def test_fine_tuning_draws_the_numbers_of_transformers(checkpoint, tmp_path):
    """transformers makes the head, once, and nothing else is drawn."""
    if checkpoint == "without a head":
        write_without_head(tmp_path)
    else:
        write(tmp_path, "bert", (), 5)

    torch.manual_seed(0)
    found = opened(tmp_path)
    drawn = torch.rand(3)

    torch.manual_seed(0)
    settings = AutoConfig.from_pretrained(tmp_path)
    settings.num_labels = 3
    auto_class = AutoModelForSequenceClassification
    plain = encoder_files.load(auto_class, settings, Source(str(tmp_path))).model
    assert torch.equal(found.model.classifier.weight, plain.classifier.weight)
    assert torch.equal(drawn, torch.rand(3))
    assert found.head.rows is None
    assert found.head.message.startswith("the head is new: ")


def test_a_head_of_another_number_of_outputs_is_new(tmp_path):
    write(tmp_path, "bert", (), 5)

    found = opened(tmp_path)

    assert "5 outputs, and 3 are needed" in found.head.message
    assert found.head.refusal_at_lr_0


@pytest.mark.parametrize(
    ("kind", "lost", "first_lost", "last_layer"),
    [
        ("bert", "pooler", "bert", "classifier.weight"),
        ("roberta", "classifier.dense", "classifier.dense", "classifier.out_proj.weight"),
    ],
)
def test_a_head_with_only_its_last_layer_is_new(kind, lost, first_lost, last_layer, tmp_path):
    """The layer below would be drawn anew, and the last one read noise."""
    write(tmp_path, kind)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    kept = {name: tensor for name, tensor in weights.items() if lost not in name}
    assert len(kept) == len(weights) - 2
    save_file(kept, file, {"format": "pt"})

    found = opened(tmp_path)

    assert found.head.rows is None
    assert f"a head that lacks 2 weights, such as {first_lost}" in found.head.message
    assert "--lr 0" in found.head.refusal_at_lr_0
    assert not torch.equal(found.model.state_dict()[last_layer], weights[last_layer])


def test_the_head_of_an_entity_classifier_is_new(tmp_path):
    settings = AutoConfig.for_model("luke", **SIZES, entity_vocab_size=10, entity_emb_size=16)
    settings.num_labels = 3
    settings.id2label = dict(enumerate(NLI))
    settings.label2id = numbered(NLI)
    transformers.LukeForEntityClassification(settings).save_pretrained(tmp_path)

    found = opened(tmp_path)

    assert found.head.rows is None
    assert "the head of a LukeForEntityClassification" in found.head.message


@pytest.mark.parametrize(
    ("head", "outputs", "labels"), [("TokenClassification", 3, NLI), ("MultipleChoice", 1, ())]
)
def test_the_head_of_another_task_is_new(head, outputs, labels, tmp_path):
    """Though its names and shapes fit."""
    write(tmp_path, "bert", (), outputs, getattr(transformers, f"AutoModelFor{head}"))

    found = opened(tmp_path, labels)

    assert found.head.rows is None
    assert f"the head of a BertFor{head}" in found.head.message


def test_a_regression_keeps_one_output(tmp_path):
    theirs = write(tmp_path, "bert", (), 1)

    found = opened(tmp_path, ())

    torch.testing.assert_close(logits(found.model), logits(theirs))
    assert found.head == heads.HeadDecision([0])


def test_a_regression_does_not_keep_the_output_of_one_class(tmp_path):
    write(tmp_path, "bert", ("toxic",), 1, problem_type="multi_label_classification")

    found = opened(tmp_path, ())

    assert found.head.rows is None
    assert "one class, toxic" in found.head.message


# Placeholders, and orders that are stated

all_placeholders = pytest.mark.parametrize(
    "names",
    [
        (),
        ("LABEL_2", "LABEL_0", "LABEL_1"),
        ("0", "1", "2"),
        ("label 0", "label 1", "label 2"),
    ],
)


@all_placeholders
def test_placeholders_say_nothing(names, tmp_path):
    theirs = write(tmp_path, "bert", names)

    found = opened(tmp_path)

    torch.testing.assert_close(logits(found.model), logits(theirs))
    assert "does not name the 3 classes" in found.head.message
    assert "entailment, neutral, contradiction" in found.head.message
    assert "state their order" in found.head.refusal_at_lr_0
    assert "--labels" in found.head.refusal_at_lr_0


@all_placeholders
def test_a_stated_order_takes_the_place_of_placeholders(names, tmp_path):
    theirs = write(tmp_path, "bert", names)

    found = opened(tmp_path, stated=("neutral", "contradiction", "Entailment"))

    torch.testing.assert_close(logits(found.model), logits(theirs)[:, [2, 0, 1]])
    assert found.head == heads.HeadDecision([2, 0, 1])
    assert found.model.config.id2label == dict(enumerate(NLI))


def test_what_is_stated_counts_before_names_and_is_said(tmp_path):
    theirs = write(tmp_path, "bert", ("yes", "no", "maybe"))

    found = opened(tmp_path, stated=("entailment", "contradiction", "neutral"))

    torch.testing.assert_close(logits(found.model), logits(theirs)[:, [0, 2, 1]])
    assert "itself names its classes yes, no, maybe" in found.head.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b", "--labels is a,b; expected entailment,neutral,contradiction"),
        ("neutral,neutral,entailment", "expected"),
    ],
)
def test_names_that_are_not_the_classes_cannot_be_stated(text, message):
    with pytest.raises(InputError, match=message):
        heads.parse_labels(text, NLI)


def test_an_order_cannot_be_stated_of_a_missing_head(tmp_path):
    write_without_head(tmp_path)

    message = "--labels states the order of a head's classes, but .*has none"

    with pytest.raises(InputError, match=message):
        opened(tmp_path, stated=NLI)


def test_an_order_cannot_be_stated_of_another_number_of_outputs(tmp_path):
    write(tmp_path, "bert", (), 5)

    message = "--labels states the order of a head's classes, but .*5 outputs"

    with pytest.raises(InputError, match=message):
        opened(tmp_path, stated=NLI)
