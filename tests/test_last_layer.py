"""The last layer of an encoder for the tokens that are used: transformers' numbers, for less."""

from dataclasses import replace

import pytest
import torch
import transformers
from model_helpers import fast, randomized
from torch import Tensor
from transformers import PreTrainedModel

from models import classification, last_layer, layers, masked_words, objectives
from train import glue

TOKENS = 32
ROWS = 4
WORDS = 100
WIDTH = 32

CONFIGURATIONS = {
    "bert": transformers.BertConfig,
    "roberta": transformers.RobertaConfig,
    "distilbert": transformers.DistilBertConfig,
    "electra": transformers.ElectraConfig,
}
every_kind = pytest.mark.parametrize("kind", CONFIGURATIONS)


@pytest.fixture(autouse=True)
def fast_forms(monkeypatch) -> None:
    """Another test of this process may have asked for the safe ones."""
    monkeypatch.setattr(layers.FORMS, "used_tokens", True)
    monkeypatch.setattr(layers.FORMS, "first_tokens", 1)


def new(kind: str, auto_class: type, **settings) -> PreTrainedModel:
    """Returns transformers' own model of three layers, without dropout."""
    numbers = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    numbers |= {"hidden_size": WIDTH, "vocab_size": WORDS, "max_position_embeddings": 64}
    if kind == "distilbert":
        numbers |= {"n_layers": 3, "n_heads": 2, "hidden_dim": 64, "dim": WIDTH}
    configuration = CONFIGURATIONS[kind](**numbers | settings)
    torch.manual_seed(0)
    return randomized(auto_class.from_config(configuration))


def rows() -> dict[str, Tensor]:
    """Returns rows of which two end in padding."""
    attention_mask = torch.ones(ROWS, TOKENS, dtype=torch.int32)
    attention_mask[1, 20:] = 0
    attention_mask[2, 9:] = 0
    return {
        "input_ids": torch.randint(5, WORDS, (ROWS, TOKENS)),
        "attention_mask": attention_mask,
        "token_type_ids": torch.zeros(ROWS, TOKENS, dtype=torch.int64),
    }


def gradients(model: PreTrainedModel, outputs: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of a sum that depends on each output in its own way."""
    weights = torch.linspace(-1, 2, outputs.numel()).view_as(outputs)
    (outputs * weights).sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("packing_parts", "first_tokens"), [(0, 1), (0, 8), (2, 1), (2, 8)])
@every_kind
def test_a_classifier_has_transformers_logits_and_gradients(
    kind, packing_parts, first_tokens, monkeypatch
):
    monkeypatch.setattr(layers.FORMS, "first_tokens", first_tokens)
    model = new(kind, transformers.AutoModelForSequenceClassification, num_labels=3)
    batch = rows()
    own = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = gradients(model, own)
    quick = fast(model, packing_parts)

    logits = classification.compute_logits(quick, batch)

    torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)
    found = gradients(quick, logits)
    # Where a parameter has no part in the result, transformers has a gradient of 0 or none.
    used = {name: values for name, values in expected.items() if values.any()}
    assert used.keys() <= found.keys()
    for name, values in used.items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-5, msg=name)


def of_last_layer(model: PreTrainedModel) -> list[torch.Size]:
    """Collects the shapes of the results of a model's last layer."""
    base = model.base_model
    stack = base.transformer if model.config.model_type == "distilbert" else base.encoder
    shapes = []
    stack.layer[-1].register_forward_hook(lambda *call: shapes.append(call[2].shape))
    return shapes


@pytest.mark.parametrize(("first_tokens", "count"), [(1, 1), (8, 8), (64, TOKENS)])
@every_kind
def test_a_classifiers_last_layer_has_the_first_tokens(kind, first_tokens, count, monkeypatch):
    monkeypatch.setattr(layers.FORMS, "first_tokens", first_tokens)
    model = fast(new(kind, transformers.AutoModelForSequenceClassification))
    shapes = of_last_layer(model)

    classification.compute_logits(model, rows())

    assert shapes == [(ROWS, count, WIDTH)]
    batch = {name: rows()[name] for name in ("input_ids", "attention_mask")}
    outputs = model.base_model(**batch, used_tokens=last_layer.FIRST)
    assert outputs.last_hidden_state.shape == (ROWS, 1, WIDTH)


@pytest.mark.parametrize("next_sentence", [False, True])
def test_pretraining_computes_the_last_layer_of_what_it_predicts(next_sentence):
    model = objectives.language_model(
        new("bert", transformers.AutoModelForMaskedLM).config, next_sentence, None
    )
    model = fast(randomized(model))
    shapes = of_last_layer(model)
    batch = rows() | {"positions": torch.tensor([[3, 8], [1, 19], [5, 0], [31, 2]])}
    if next_sentence:
        batch["next_sentence"] = torch.zeros(ROWS)

    result = masked_words.forward(model, batch)
    of_all = masked_words.forward(model, batch, all_hidden=True)

    assert shapes == [(ROWS, 2 + next_sentence, WIDTH), (ROWS, TOKENS, WIDTH)]
    assert "hidden" not in result
    for name, values in result.items():
        torch.testing.assert_close(values, of_all[name], rtol=1e-5, atol=1e-5)


def test_positions_count_within_a_row_of_several():
    x = torch.arange(4 * 6).view(4, 6, 1).float()
    positions = torch.tensor([[0, 5], [1, 2], [3, 3], [4, 0]])

    together = last_layer.of_packed(positions, 2, 6)

    found = last_layer.take(x.view(2, 12, 1), together).view(4, 2, 1)
    assert torch.equal(found, layers.take(x, positions))


@pytest.mark.parametrize("settings", [{"is_decoder": True}, {"chunk_size_feed_forward": 2}])
def test_other_layers_compute_all_tokens(settings):
    model = fast(new("bert", transformers.AutoModelForSequenceClassification, **settings))

    assert not last_layer.is_enabled(model)
    assert last_layer.of_classifier(model) == {}


def test_safe_forms_compute_all_tokens(monkeypatch):
    """The TPU's compiler dies of the others with --remat and its own stack."""
    model = fast(new("bert", transformers.AutoModelForSequenceClassification))
    shapes = of_last_layer(model)
    monkeypatch.setattr(layers.FORMS, "used_tokens", False)

    classification.compute_logits(model, rows())

    assert shapes == [(ROWS, TOKENS, WIDTH)]


def test_a_head_of_all_tokens_gets_all():
    model = fast(new("bert", transformers.AutoModelForTokenClassification))

    assert last_layer.is_enabled(model)
    assert last_layer.of_classifier(model) == {}


@pytest.mark.parametrize(("kind", "first_tokens"), [("TPU v5 lite", 8), ("CPU", 1)])
def test_on_tpus_the_first_tokens_fill_a_register(kind, first_tokens, mesh, monkeypatch):
    """With the first token alone a step compiled by libtpu 0.0.21 takes a third longer."""
    monkeypatch.setattr(glue.device, "to_device", lambda model, *_: model)
    model = new("bert", transformers.AutoModelForSequenceClassification)

    glue.on_device(model, replace(mesh, kind=kind))

    assert layers.FORMS.first_tokens == first_tokens
