"""Tests models/architectures.py.

Each encoder of transformers that `--model auto` runs, of two layers, is compared on XLA with
transformers' own; others are refused; and a model says what it has (positions, tables, norms).
"""

import copy
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from model_helpers import assert_all_close, randomized
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from data import glue
from errors import InputError
from models import architectures, classification, encoder_files, encoder_layers, layers
from train.common import device

ROOT = Path(__file__).parent.parent
WORDS = 101
POSITIONS = 40
LENGTH = 32
PAD = 1

# Architectures that run

COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "num_labels": 3,
}
# What the configuration of a model_type has besides COMMON; None: it does not have that.
RUN = {
    "albert": {"embedding_size": 16},
    "bert": {},
    "big_bird": {"attention_type": "original_full"},
    "camembert": {},
    "data2vec-text": {},
    "deberta": {},
    "deberta-v2": {
        "relative_attention": True,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    },
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "electra": {"embedding_size": 16},
    "ernie": {},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
    "eurobert": {"num_key_value_heads": 1},
    "gte": {},
    "jina_embeddings_v3": {},
    "layoutlm": {},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "markuplm": {},
    "megatron-bert": {},
    "mobilebert": {
        "embedding_size": 16,
        "true_hidden_size": 16,
        "intra_bottleneck_size": 16,
        "num_feedforward_networks": 2,
    },
    "modernbert": {
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "cls_token_id": 0,
        "sep_token_id": 2,
    },
    "mpnet": {},
    "mra": {},
    "nomic_bert": {},
    "perceiver": {
        "d_model": 32,
        "d_latents": 32,
        "num_latents": 8,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "roberta": {},
    "roberta-prelayernorm": {},
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
    "roformer": {"embedding_size": 32},
    "squeezebert": {"embedding_size": 32},
    "xlm-roberta": {},
    "xlm-roberta-xl": {},
    "xlnet": {
        "max_position_embeddings": None,
        "d_model": 32,
        "n_layer": 2,
        "n_head": 2,
        "d_inner": 64,
    },
    "yoso": {},
}
# Different attention, norms, positions and masks; the rest is slow.
QUICK = ("data2vec-text", "deberta-v2", "eurobert", "modernbert", "mpnet")
each_that_runs = pytest.mark.parametrize("kind", RUN)


def slow_but(*quick: str) -> list:
    """Returns all architectures that run as parameters, slow but for those of `quick`."""
    parameters = []
    for kind in RUN:
        marks = () if kind in quick else pytest.mark.slow
        parameters.append(pytest.param(kind, marks=marks))
    return parameters


# Architectures that are refused


@dataclass(frozen=True)
class Refused:
    """Why an architecture does not run."""

    reason: str  # a part of the message
    settings: dict[str, Any] = field(default_factory=dict)  # besides COMMON


HOST = "reads numbers on the host in modeling_"
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 2, "pad_index": PAD}
FUNNEL = {
    "num_hidden_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "intermediate_size": None,
    "max_position_embeddings": None,
    "d_model": 32,
    "n_head": 2,
    "d_head": 16,
    "d_inner": 64,
    "block_sizes": [1, 1],
}
XMOD = {"languages": ["en_XX"], "default_language": "en_XX"}
REFUSED = {
    "bart": Refused("an encoder with a decoder", {"d_model": 32}),
    "clip": Refused("transformers has no text classifier of"),
    "convbert": Refused("XLA has not its operations col2im, im2col", {"embedding_size": 32}),
    "flaubert": Refused(HOST + "flaubert.py, line", XLM),
    "fnet": Refused("takes no attention_mask"),
    "funnel": Refused("XLA has not its operations avg_pool2d_backward", FUNNEL),
    "gpt2": Refused("no token sees the next"),
    "ibert": Refused("reads numbers on the host in quant_modules.py"),
    "llama": Refused("no token sees the next"),
    "longformer": Refused(HOST + "longformer.py, line", {"attention_window": 8}),
    "t5": Refused("an encoder with a decoder"),
    "vit": Refused("transformers has no text classifier of"),
    "xlm": Refused(HOST + "xlm.py, line", XLM),
    "xmod": Refused(HOST + "xmod.py, line", XMOD),
}


# Models and batches


def settings_of(kind: str, **more) -> PreTrainedConfig:
    """Returns the configuration of two layers of an architecture."""
    own = RUN[kind] if kind in RUN else REFUSED[kind].settings
    settings = {}
    for name, value in (COMMON | own | more).items():
        if value is not None:
            settings[name] = value

    torch.manual_seed(0)
    return AutoConfig.for_model(kind, **settings)


def new(kind: str, **more) -> PreTrainedModel:
    """Returns transformers' own model without dropout.

    Its weights make it look at everything that it can.
    """
    model = AutoModelForSequenceClassification.from_config(settings_of(kind, **more))
    randomized(model)
    with torch.no_grad():
        for module in model.modules():
            own_norm = architectures.is_norm(module) and not isinstance(module, nn.LayerNorm)
            if own_norm and isinstance(getattr(module, "weight", None), nn.Parameter):
                module.weight.add_(1)
    return model


def on_devices(model: PreTrainedModel, mesh: device.Mesh) -> PreTrainedModel:
    """Returns a copy of a model with our layers on the devices."""
    return device.to_device(encoder_layers.fast_layers(copy.deepcopy(model)), mesh)


def batch_of(kind: str, rows: int = 4, length: int = LENGTH) -> dict[str, Tensor]:
    """Returns rows of different lengths, the last of them without an example."""
    ids = torch.randint(5, WORDS, (rows, length))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, length - 9 * row :] = 0
    mask[-1, 1:] = 0
    if kind == "xlnet":  # which pads at the left
        mask = mask.flip(1)

    return {
        "input_ids": ids.where(mask == 1, PAD),
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(ids),
    }


def uploaded(batch: dict[str, Tensor], mesh: device.Mesh) -> dict[str, Tensor]:
    return {name: values.to(mesh.device) for name, values in batch.items()}


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the gradients of the parameters that have one."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    return gradients


# Steps


@pytest.mark.parametrize("kind", slow_but(*QUICK))
def test_a_step_on_xla_is_transformers(kind, mesh):
    """The logits and all gradients in float32; strict: an operation on the host, or a read,
    raises."""
    architectures.check(kind, settings_of(kind))
    plain = new(kind)
    batch = batch_of(kind)
    ours = on_devices(plain, mesh)
    wanted = torch.randn(len(batch["input_ids"]), 3)

    def step(
        model: PreTrainedModel, batch: dict[str, Tensor], wanted: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits = classification.compute_logits(model, batch)
        (logits * wanted).sum().backward()
        gradients = gradients_of(model)
        model.zero_grad(set_to_none=True)
        return logits.detach(), gradients

    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if architectures.takes_types(plain):
        inputs["token_type_ids"] = batch["token_type_ids"]
    expected = plain(**inputs).logits
    (expected * wanted).sum().backward()
    expected_gradients = gradients_of(plain)

    compiled_step = device.compiled(step, mesh)
    found, gradients = compiled_step(ours, uploaded(batch, mesh), wanted.to(mesh.device))

    assert expected.std(0).min() > 1e-3
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(found.cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
    assert len(expected_gradients) > 12
    largest = max(gradient.abs().max().item() for gradient in expected_gradients.values())
    assert_all_close(gradients, expected_gradients, rtol=1e-3, share=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("kind", slow_but("deberta"))
def test_bfloat16_is_near_and_finite_in_training(kind, mesh):
    """Numbers of float32 that bfloat16 has not, such as a mask's lowest, become infinite on XLA, in
    silence."""
    plain = new(kind)
    batch = batch_of(kind)
    batch_on_devices = uploaded(batch, mesh)
    ours = on_devices(plain, mesh)

    def train(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.autocast("xla", torch.bfloat16):
            logits = classification.compute_logits(model, batch)
        logits.float().square().sum().backward()
        gradients = gradients_of(model)
        model.zero_grad(set_to_none=True)
        return gradients

    def evaluate(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), torch.autocast("xla", torch.bfloat16):
            return classification.compute_logits(model, batch).float()

    found = device.compiled(evaluate, mesh)(ours, batch_on_devices).cpu()
    with torch.no_grad():
        expected = classification.compute_logits(plain, batch)
    near = 0.03 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=near)

    gradients = device.compiled(train, mesh)(ours.train(), batch_on_devices)
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient.cpu()).all(), name


# Refusals


def listed(begin: str) -> list[str]:
    """Returns the architectures of a sentence of the page on data that begins so."""
    page = (ROOT / "docs/data.md").read_text()
    sentence = re.search(begin + r"(.+?)\.\n", page, re.DOTALL)[1]
    return re.findall(r"`([\w-]+)`", sentence)


def test_the_page_lists_what_runs():
    runs = listed("These architectures run: ")

    assert runs == sorted(RUN)
    assert len(runs) >= 25


def test_the_page_lists_what_is_refused():
    assert listed("Refused: ") == sorted(REFUSED)


@pytest.mark.xla
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_run_is_refused_when_it_is_opened(kind, tmp_path):
    """It is refused in one sentence."""
    if kind in ("clip", "vit", "t5"):
        settings = AutoConfig.for_model(kind)
    else:
        settings = settings_of(kind)
    settings.save_pretrained(tmp_path)

    reason = re.escape(REFUSED[kind].reason)
    with pytest.raises(InputError, match=f"checkpoint {tmp_path} is a {kind}.*{reason}") as error:
        encoder_files.open_checkpoint(str(tmp_path), "auto")

    assert "\n" not in str(error.value)


READ_NUMBERS = [kind for kind, refused in REFUSED.items() if refused.reason.startswith(HOST)]


@pytest.mark.parametrize("kind", READ_NUMBERS)
def test_what_reads_numbers_is_not_refused_on_plain_pytorch(kind):
    architectures.check("it", settings_of(kind), compiled=False)  # PyTorch itself can read


NO_MODEL = "of which transformers makes no model"


@pytest.mark.xla
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        # A package is missing.
        ("layoutlmv2", f"{NO_MODEL} .ImportError.*detectron2"),
        # Its default has no vocabulary.
        ("esm", f"{NO_MODEL} .TypeError"),
        # The tokenizer's files are missing.
        ("markuplm", "cannot be read: its tokenizer is not there, or not whole .TypeError"),
        ("tapas", "XLA has not its operations scatter_reduce.two"),
    ],
)
def test_what_cannot_even_be_made_is_refused_in_a_sentence(kind, message, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)

    with pytest.raises(InputError, match=message) as error:
        encoder_files.open_checkpoint(str(tmp_path), "auto")

    assert "\n" not in str(error.value)


def test_a_tokenizer_that_is_not_fast_is_refused(tmp_path):
    AutoConfig.for_model("canine").save_pretrained(tmp_path)
    tokenizer = encoder_files.open_checkpoint(str(tmp_path), "auto").tokenizer
    examples = glue.read("synthetic", "sst2", "train")

    with pytest.raises(InputError, match="CanineTokenizer is not a fast tokenizer"):
        glue.Encoded(examples, tokenizer, 32)


def test_a_model_that_changes_in_its_first_step_is_refused():
    settings = settings_of("big_bird", attention_type="block_sparse")

    message = "replaces BigBirdBlockSparseAttention by BigBirdSelfAttention in its first"
    with pytest.raises(InputError, match=message):
        architectures.check("it", settings)


def test_a_decoder_is_refused():
    with pytest.raises(InputError, match="is a bert, in which no token sees the next"):
        architectures.check("it", settings_of("bert", is_decoder=True))


def test_attention_may_be_given_what_changes_nothing():
    options = {"sliding_window": 4, "output_attentions": False, "head_mask": None}
    architectures.refuse_more(SimpleNamespace(), options)


def test_attention_with_a_bias_of_its_own_is_refused():
    qkv = [torch.zeros(1, 1, 2, 4)] * 3
    bias = torch.zeros(1, 1, 2, 2)

    with pytest.raises(InputError, match="gives its attention position_bias, which"):
        encoder_layers.attend(SimpleNamespace(), *qkv, None, position_bias=bias)


# Positions


@each_that_runs
def test_the_longest_row_is_that_of_transformers(kind):
    """A row of so many tokens works, and of one more does not."""
    model = new(kind)
    longest = architectures.positions(model)

    def run(length: int) -> Tensor:
        ids = torch.randint(5, WORDS, (1, length))
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits

    if longest == float("inf"):
        run(4 * POSITIONS)
        return

    assert run(longest).shape == (1, 3)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        run(longest + 1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("bert", 40), ("data2vec-text", 38), ("mpnet", 38), ("roberta", 38), ("esm", float("inf"))],
)
def test_positions_begin_after_the_paddings_or_at_0(kind, expected):
    assert architectures.positions(new(kind)) == expected


def test_positions_that_are_built_count():
    """What the configuration says does not."""
    model = new("data2vec-text", max_position_embeddings=34)
    model.config.max_position_embeddings = 512

    assert architectures.positions(model) == 32


# Norms and products


def decayed_ids(model: PreTrainedModel) -> set[int]:
    """Returns the identities of the parameters that decay; asserts that transformers' Trainer lets
    the same decay."""
    decayed, exempt = architectures.parameter_groups(model, 0.1)
    ids = {id(parameter) for parameter in decayed["params"]}

    parameters = dict(model.named_parameters())
    found = {name for name, parameter in parameters.items() if id(parameter) in ids}
    trainers = transformers.Trainer.get_decay_parameter_names(None, model)
    assert found == {name for name in trainers if name in parameters}

    assert exempt["weight_decay"] == 0.0
    assert len(exempt["params"]) > 4
    return ids


@each_that_runs
def test_norms_and_biases_do_not_decay_as_with_trainer(kind):
    decayed_ids(new(kind))

    ours = encoder_layers.fast_layers(new(kind))
    decayed = decayed_ids(ours)

    for module in ours.modules():
        if architectures.is_norm(module):
            for parameter in module.parameters(recurse=False):
                assert id(parameter) not in decayed


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.usefixtures("form")
def test_a_layer_norm_may_have_no_bias_and_no_weight(bias, affine):
    norm = nn.LayerNorm(24, elementwise_affine=affine, bias=bias)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    ours = layers.LayerNorm(24, elementwise_affine=affine, bias=bias)
    ours.load_state_dict(norm.state_dict())

    x = torch.randn(3, 5, 24)

    torch.testing.assert_close(ours(x), norm(x))


@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 3, 24), (2, 3, 5, 24)])
@pytest.mark.usefixtures("form")
def test_a_product_takes_any_number_of_dimensions(shape):
    x = torch.randn(shape)
    product = nn.Linear(24, 7)

    found = layers.linear(x, product.weight, product.bias)

    torch.testing.assert_close(found, product(x))


def test_a_norm_over_several_dimensions_stays():
    model = nn.Sequential(nn.LayerNorm((4, 6)), nn.LayerNorm(6))
    model.config = SimpleNamespace(model_type="of no record")
    model._supports_attention_backend = False

    encoder_layers.fast_layers(model)

    assert [type(module) for module in model] == [nn.LayerNorm, layers.LayerNorm]


# Exports


def export(model: PreTrainedModel, folder: Path) -> None:
    """Saves a model without a tokenizer."""
    tokenizer = SimpleNamespace(is_fast=False, save_pretrained=lambda folder: None)
    encoder_files.save(str(folder), model, model.state_dict(), tokenizer)


@pytest.mark.parametrize("kind", QUICK)
def test_an_export_loads_unchanged(kind, tmp_path):
    model = new(kind)
    export(encoder_layers.fast_layers(copy.deepcopy(model)), tmp_path)

    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()

    batch = batch_of(kind)
    batch.pop("token_type_ids")
    torch.testing.assert_close(again(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("kind", QUICK)
def test_an_export_names_nothing_of_ours(kind, tmp_path):
    ours = encoder_layers.fast_layers(new(kind))

    export(ours, tmp_path)

    text = (tmp_path / "config.json").read_text()
    assert encoder_layers.ATTENTION not in text
    assert f'"{architectures.OWN}"' not in text
    # The model itself stays as it was.
    own_names = (encoder_layers.ATTENTION, architectures.OWN)
    assert ours.config._attn_implementation in own_names


# What a batch can index


def indexed(**more: Tensor) -> dict[str, Tensor]:
    """Returns a batch in host memory."""
    ids = torch.randint(0, WORDS, (4, LENGTH), dtype=torch.int32)
    batch = {
        "input_ids": ids,
        "token_type_ids": torch.zeros_like(ids),
        "labels": torch.tensor([0, 1, 2, 0]),
    }
    return batch | more


def test_limits_are_the_sizes_of_tables_and_classes():
    rows = {"input_ids": WORDS, "token_type_ids": 2, "labels": 3}
    expected = architectures.Limits(rows=rows, positions=POSITIONS)

    assert architectures.limits(new("bert")) == expected


def test_a_batch_within_the_limits_is_accepted():
    limits = architectures.limits(new("bert"))

    limits.check(indexed())
    limits.check(indexed(labels=torch.tensor([0.5, -3.0, 9.0, 0.0])))  # of a regression


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "input_ids",
            WORDS,
            f"{WORDS} .row 2 of a batch., and the model has {WORDS} of them, 0 to 100",
        ),
        ("input_ids", -1, "-1 .row 2"),
        ("token_type_ids", 2, "2 .row 2 of a batch., and the model has 2 of them, 0 to 1"),
        ("labels", 3, "3 .row 2 of a batch., and the model has 3 of them"),
    ],
)
def test_what_a_batch_indexes_is_checked_on_the_host(name, wrong, message):
    limits = architectures.limits(new("bert"))
    batch = indexed()
    batch[name][2] = wrong

    with pytest.raises(InputError, match=f"{name} has {message}"):
        limits.check(batch)


def test_a_batch_of_too_long_rows_is_refused():
    limits = architectures.limits(new("bert"))
    batch = indexed(input_ids=torch.zeros(4, 41, dtype=torch.int32))

    with pytest.raises(InputError, match="rows have 41 tokens; the model has 40 positions"):
        limits.check(batch)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("roberta", {"type_vocab_size": 1}),
        ("distilbert", {}),
        ("xlnet", {}),  # whose types are relations, without a table
    ],
)
def test_types_that_a_model_is_not_given_are_not_checked(kind, settings):
    limits = architectures.limits(new(kind, **settings))

    assert limits.rows == {"input_ids": WORDS, "labels": 3}


def test_tokens_that_were_added_to_a_model_are_within_its_limits():
    grown = new("bert")
    grown.resize_token_embeddings(WORDS + 3)

    assert architectures.limits(grown).rows["input_ids"] == WORDS + 3


def test_labels_of_a_head_of_words_are_words():
    """They are not the 3 classes of its configuration."""
    masked = transformers.AutoModelForMaskedLM.from_config(new("bert").config)

    assert architectures.limits(masked).rows["labels"] == WORDS


def test_tokens_of_a_table_that_is_no_embedding_are_checked():
    limits = architectures.limits(new("perceiver"))

    assert limits.rows == {"input_ids": WORDS, "labels": 3}
