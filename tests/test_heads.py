"""models/heads.py and what stands on it: the head of a checkpoint is kept by the names of its classes, in any order and
case; else it is new, refused or stated. transformers' and torchvision's own models are the reference."""

import copy
import json
import unicodedata
from pathlib import Path

import pytest
import torch
import transformers
from model_helpers import randomized
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from errors import InputError
from models import classification, encoder_files, heads
from models.encoder_files import Source

NLI = ("entailment", "neutral", "contradiction")
THEIRS = ("CONTRADICTION", "Neutral", "entailment")  # as checkpoints of MNLI have it
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 1}
SIZES |= {"intermediate_size": 16, "max_position_embeddings": 34, "embedding_size": 16}
OWN_SIZES = {
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    "xlnet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
    "funnel": {"block_sizes": [1], "num_decoder_layers": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16},
    "modernbert": {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3, "decoder_bias": True},
    "xlm": {"emb_dim": 16, "n_layers": 1, "n_heads": 2},
    "flaubert": {"emb_dim": 16, "n_layers": 1, "n_heads": 2},
    "bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "eos_token_id": 3},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
}  # fmt: skip
UNLIKE = OWN_SIZES.keys() - {"modernbert"}  # the names of these sizes are not BERT's
KINDS = ["bert", "roberta", "albert", "electra", "camembert", "xlm-roberta", "deberta", "deberta-v2", "convbert"]
KINDS += ["mobilebert", "mpnet", "squeezebert", "megatron-bert", "rembert", "roformer", "nezha", *OWN_SIZES]
KINDS = [kind for kind in KINDS if kind in transformers.CONFIG_MAPPING]


def write(folder: Path, kind: str, names=THEIRS, count: int = 3, head=AutoModelForSequenceClassification, **settings):
    """Writes a new tiny checkpoint with these names of classes; returns its model."""
    sizes = {"vocab_size": 40, "pad_token_id": 1} if kind in UNLIKE else SIZES
    sizes = sizes | OWN_SIZES.get(kind, {}) | settings
    config = AutoConfig.for_model(kind, **sizes)
    config.num_labels = count
    if names:
        config.id2label, config.label2id = dict(enumerate(names)), {name: n for n, name in enumerate(names)}
    model = randomized(head.from_config(config))
    model.save_pretrained(folder)
    return model


def opened(folder: Path, labels=NLI, stated=()) -> classification.Classifier:
    return classification.classifier(AutoConfig.from_pretrained(folder), labels, Source(str(folder)), stated)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    ids = torch.tensor([[2, 5, 9, 30, 3], [2, 8, 7, 7, 3]])
    return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


@pytest.mark.parametrize("kind", KINDS)
def test_rows_follow_the_names_in_every_architecture(kind, tmp_path):
    """Whatever the last layer is called: classifier, out_proj, logits_proj, score …; with a bias or without."""
    theirs = write(tmp_path, kind)
    found = opened(tmp_path)
    expected = logits(theirs)
    assert (expected[:, 0] - expected[:, 2]).abs().min() > 1e-6
    torch.testing.assert_close(logits(found.model), expected[:, [2, 1, 0]])
    assert found.head.rows == [2, 1, 0] and not found.head.refusal_at_lr_0
    assert "order CONTRADICTION, Neutral, entailment" in found.head.message
    assert found.model.config.id2label == dict(enumerate(NLI))
    found.model.save_pretrained(tmp_path / "again")
    again = opened(tmp_path / "again")
    assert again.head == heads.HeadDecision([0, 1, 2])
    torch.testing.assert_close(logits(again.model), expected[:, [2, 1, 0]], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlnet", "gpt2"])
def test_a_head_for_other_classes_is_new_and_nothing_else(kind, tmp_path):
    theirs = write(tmp_path, kind, ("yes", "no", "maybe"))
    before = copy.deepcopy(theirs.state_dict())
    found = opened(tmp_path)
    assert found.head.rows is None and found.head.message.startswith("the head is new: ")
    assert "yes, no, maybe" in found.head.message and "entailment, neutral, contradiction" in found.head.message
    assert "--labels" in found.head.message and "--lr 0" in found.head.refusal_at_lr_0
    changed = {name for name, value in found.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(classification._label_dims(found.model))
    for name in changed:
        spread = found.model.state_dict()[name].std().item()
        assert 0.01 < spread < 0.04 if name.endswith("weight") else spread == 0


def test_a_normal_fine_tuning_draws_the_numbers_that_it_drew(tmp_path):
    """A checkpoint without a head, and one for another number of classes: transformers makes both, once."""
    write(tmp_path / "words", "bert", (), head=transformers.AutoModelForMaskedLM)
    write(tmp_path / "five", "bert", (), 5)
    for name in ("words", "five"):
        torch.manual_seed(0)
        found = opened(tmp_path / name)
        drawn = torch.rand(3)
        torch.manual_seed(0)
        settings = AutoConfig.from_pretrained(tmp_path / name)
        settings.num_labels = 3
        plain = encoder_files.load(AutoModelForSequenceClassification, settings, Source(str(tmp_path / name))).model
        assert torch.equal(found.model.classifier.weight, plain.classifier.weight) and torch.equal(drawn, torch.rand(3))
        assert found.head.rows is None and found.head.message.startswith("the head is new: ")
    assert "5 outputs, and 3 are needed" in found.head.message and found.head.refusal_at_lr_0


@pytest.mark.parametrize(
    "names", [(), ("LABEL_2", "LABEL_0", "LABEL_1"), ("0", "1", "2"), ("label 0", "label 1", "label 2")]
)
def test_placeholders_say_nothing(names, tmp_path):
    theirs = write(tmp_path, "bert", names)
    found = opened(tmp_path)
    torch.testing.assert_close(logits(found.model), logits(theirs))
    assert "does not name the 3 classes" in found.head.message
    assert "entailment, neutral, contradiction" in found.head.message
    assert "state their order" in found.head.refusal_at_lr_0 and "--labels" in found.head.refusal_at_lr_0
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
    [("a,b", "--labels is a,b; expected entailment,neutral,contradiction"), ("neutral,neutral,entailment", "expected")],
)
def test_names_that_are_not_the_classes_cannot_be_stated(text, message):
    with pytest.raises(InputError, match=message):
        heads.parse_labels(text, NLI)


def test_an_order_cannot_be_stated_of_a_head_that_is_not_there(tmp_path):
    write(tmp_path / "words", "bert", (), head=transformers.AutoModelForMaskedLM)
    write(tmp_path / "five", "bert", (), 5)
    for name, message in (("words", "has none"), ("five", "5 outputs")):
        with pytest.raises(InputError, match=f"--labels states the order of a head's classes, but .*{message}"):
            opened(tmp_path / name, stated=NLI)


def test_two_tables_that_contradict_each_other_are_refused(tmp_path):
    write(tmp_path, "bert", NLI)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"label2id": {name: n for n, name in enumerate(THEIRS)}}))
    with pytest.raises(InputError, match="entailment, neutral, contradiction by its id2label, .*label2id; state"):
        opened(tmp_path)
    assert opened(tmp_path, stated=THEIRS).head.rows == [2, 1, 0]


@pytest.mark.parametrize("numbers", [(0, 1, 2), ("0", "1", "2")])
def test_names_that_stand_in_label2id_alone_decide_too(numbers, tmp_path):
    """As where somebody has set model.config.label2id and forgotten the other."""
    theirs = write(tmp_path, "bert", ())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"label2id": dict(zip(THEIRS, numbers, strict=True))}))
    assert AutoConfig.from_pretrained(tmp_path).id2label[0] == "LABEL_0"
    found = opened(tmp_path)
    assert found.head.rows == [2, 1, 0] and not found.head.refusal_at_lr_0
    torch.testing.assert_close(logits(found.model), logits(theirs)[:, [2, 1, 0]])
    assert opened(tmp_path, stated=("neutral", "entailment", "contradiction")).head.rows == [1, 0, 2]


@pytest.mark.parametrize(("kind", "lost"), [("bert", "pooler"), ("roberta", "classifier.dense")])
def test_a_head_of_which_only_the_last_layer_is_there_is_new(kind, lost, tmp_path):
    """The layer below would be drawn anew, and the last one read noise."""
    write(tmp_path, kind)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if lost not in name}
    assert len(kept) == len(weights) - 2
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    found = opened(tmp_path)
    assert found.head.rows is None and f"a head that lacks 2 weights, such as {kind if lost == 'pooler' else lost}" in (
        found.head.message
    )
    assert "--lr 0" in found.head.refusal_at_lr_0
    assert not torch.equal(found.model.state_dict()[last_layer(kind)], weights[last_layer(kind)])


def last_layer(kind: str) -> str:
    return "classifier.out_proj.weight" if kind == "roberta" else "classifier.weight"


def test_the_head_of_an_entity_classifier_is_new(tmp_path):
    settings = AutoConfig.for_model("luke", **SIZES, entity_vocab_size=10, entity_emb_size=16)
    settings.num_labels = 3
    settings.id2label, settings.label2id = dict(enumerate(NLI)), {name: n for n, name in enumerate(NLI)}
    transformers.LukeForEntityClassification(settings).save_pretrained(tmp_path)
    found = opened(tmp_path)
    assert found.head.rows is None and "the head of a LukeForEntityClassification" in found.head.message


@pytest.mark.parametrize("head", ["TokenClassification", "MultipleChoice"])
def test_the_head_of_another_job_is_new_though_its_names_and_shapes_fit(head, tmp_path):
    write(tmp_path, "bert", (), 3 if head == "TokenClassification" else 1, getattr(transformers, f"AutoModelFor{head}"))
    found = opened(tmp_path, NLI if head == "TokenClassification" else ())
    assert found.head.rows is None and f"the head of a BertFor{head}" in found.head.message


def test_a_regression_keeps_one_output_but_not_that_of_one_class(tmp_path):
    theirs = write(tmp_path / "score", "bert", (), 1)
    found = opened(tmp_path / "score", ())
    torch.testing.assert_close(logits(found.model), logits(theirs))
    assert found.head == heads.HeadDecision([0])
    write(tmp_path / "toxic", "bert", ("toxic",), 1, problem_type="multi_label_classification")
    found = opened(tmp_path / "toxic", ())
    assert found.head.rows is None and "one class, toxic" in found.head.message


def test_names_are_the_same_in_any_case_and_form():
    composed, parted = (unicodedata.normalize(form, "Café") for form in ("NFC", "NFD"))
    assert heads.match([parted, "not-entailment", " X "], ["x", composed.lower(), "not entailment"]) == [2, 0, 1]
    assert heads.match(["Cat", "cat"], ["cat", "Cat"]) == [1, 0], "two that differ in case alone"
    assert heads.match(["Cat", "cat"], ["cat", "CAT"]) is None
    assert heads.match(["a", "b"], ["a", "b", "c"]) is heads.match(["a", "a"], ["a", "a"]) is None
    assert heads.match(["1", "0"], ["0", "1"]) == [1, 0], "the data's own names may be numbers"
