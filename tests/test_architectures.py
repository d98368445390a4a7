"""models/architectures.py: each encoder of transformers that `--model auto` runs, of two layers, on XLA beside
transformers' own; those that it refuses; and what a model says of itself (positions, tables, norms)."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from model_helpers import assert_all_close, randomized
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from data import glue
from errors import InputError
from models import architectures, classification, encoder_files, encoder_layers, layers
from train.common import device

ROOT = Path(__file__).parent.parent
WORDS, POSITIONS, LENGTH, PAD = 101, 40, 32, 1
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
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 2, "pad_index": PAD}

# model_type -> what its configuration has besides COMMON; None: it does not have that.
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
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 2},
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
    "xlnet": {"max_position_embeddings": None, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
    "yoso": {},
}
# Different attention, norms, positions and masks; the rest is slow.
QUICK = ("data2vec-text", "deberta-v2", "eurobert", "modernbert", "mpnet")
HOST = "reads numbers on the host in modeling_"
REFUSED = {
    "bart": ({"d_model": 32}, "an encoder with a decoder"),
    "clip": ({}, "transformers has no text classifier of"),
    "convbert": ({"embedding_size": 32}, "XLA has not its operations col2im, im2col"),
    "flaubert": (XLM, HOST + "flaubert.py, line"),
    "fnet": ({}, "takes no attention_mask"),
    "funnel": (FUNNEL, "XLA has not its operations avg_pool2d_backward"),
    "gpt2": ({}, "no token sees the next"),
    "ibert": ({}, "reads numbers on the host in quant_modules.py"),
    "llama": ({}, "no token sees the next"),
    "longformer": ({"attention_window": 8}, HOST + "longformer.py, line"),
    "t5": ({}, "an encoder with a decoder"),
    "vit": ({}, "transformers has no text classifier of"),
    "xlm": (XLM, HOST + "xlm.py, line"),
    "xmod": ({"languages": ["en_XX"], "default_language": "en_XX"}, HOST + "xmod.py, line"),
}
each_that_runs = pytest.mark.parametrize("kind", RUN)


def settings_of(kind: str, **more) -> PreTrainedConfig:
    own = RUN[kind] if kind in RUN else REFUSED[kind][0]
    given = {name: value for name, value in (COMMON | own | more).items() if value is not None}
    torch.manual_seed(0)
    return AutoConfig.for_model(kind, **given)


def new(kind: str, **more) -> PreTrainedModel:
    """transformers' own model, whose weights make it look at everything that it can; no dropout."""
    model = AutoModelForSequenceClassification.from_config(settings_of(kind, **more))
    randomized(model)
    with torch.no_grad():
        for module in model.modules():
            own = architectures.is_norm(module) and not isinstance(module, nn.LayerNorm)
            if own and isinstance(getattr(module, "weight", None), nn.Parameter):
                module.weight.add_(1)
    return model


def batch_of(kind: str, rows: int = 4, length: int = LENGTH) -> dict[str, Tensor]:
    """Rows of different lengths, the last of them without an example."""
    ids = torch.randint(5, WORDS, (rows, length))
    mask = torch.ones_like(ids)
    sides = {"xlnet": slice(None, None, -1)}
    for row in range(1, rows):
        mask[row, length - 9 * row :] = 0
    mask[-1, 1:] = 0
    mask = mask.numpy()[:, sides.get(kind, slice(None))].copy()
    mask = torch.from_numpy(mask)
    return {"input_ids": ids.where(mask == 1, PAD), "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in RUN])
def test_a_step_on_xla_is_transformers(kind, mesh):
    """The logits and all gradients in float32; strict: an operation on the host, or a read, raises."""
    architectures.check(kind, settings_of(kind))
    plain, batch = new(kind), batch_of(kind)
    ours = device.to_device(encoder_layers.fast_layers(copy.deepcopy(plain)), mesh)
    wanted = torch.randn(len(batch["input_ids"]), 3)

    def step(model: PreTrainedModel, batch: dict[str, Tensor], wanted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = classification.compute_logits(model, batch)
        (logits * wanted).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return logits.detach(), gradients

    types = {"token_type_ids": batch["token_type_ids"]} if architectures.takes_types(plain) else {}
    expected = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **types).logits
    (expected * wanted).sum().backward()
    uploaded = {name: values.to(mesh.device) for name, values in batch.items()}
    found, of_ours = device.compiled(step, mesh)(ours, uploaded, wanted.to(mesh.device))

    assert expected.std(0).min() > 1e-3 and torch.isfinite(expected).all()
    torch.testing.assert_close(found.cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert len(gradients) > 12
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert_all_close(of_ours, gradients, rtol=1e-3, share=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "deberta" else pytest.mark.slow) for kind in RUN]
)
def test_bfloat16_is_near_and_finite_in_training(kind, mesh):
    """Numbers of float32 that bfloat16 has not, such as a mask's lowest, become infinite on XLA, in silence."""
    plain, batch = new(kind), batch_of(kind)
    ours = device.to_device(encoder_layers.fast_layers(copy.deepcopy(plain)), mesh)
    uploaded = {name: values.to(mesh.device) for name, values in batch.items()}

    def train(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.autocast("xla", torch.bfloat16):
            logits = classification.compute_logits(model, batch)
        logits.float().square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return gradients

    def evaluate(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), torch.autocast("xla", torch.bfloat16):
            return classification.compute_logits(model, batch).float()

    found = device.compiled(evaluate, mesh)(ours, uploaded).cpu()
    with torch.no_grad():
        expected = classification.compute_logits(plain, batch)
    within = 0.03 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=within)
    for name, gradient in device.compiled(train, mesh)(ours.train(), uploaded).items():
        assert torch.isfinite(gradient.cpu()).all(), name


def test_the_page_lists_what_runs_and_what_is_refused():
    page = (ROOT / "docs/data.md").read_text()
    runs, refused = (
        re.findall(r"`([\w-]+)`", re.search(begin + r"(.+?)\.\n", page, re.DOTALL)[1])
        for begin in ("These architectures run: ", "Refused: ")
    )
    assert runs == sorted(RUN) and len(runs) >= 25
    assert refused == sorted(REFUSED)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_run_is_refused_in_a_sentence_when_it_is_opened(kind, tmp_path):
    _, reason = REFUSED[kind]
    settings = AutoConfig.for_model(kind) if kind in ("clip", "vit", "t5") else settings_of(kind)
    settings.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"checkpoint {tmp_path} is a {kind}.*{re.escape(reason)}") as error:
        encoder_files.open_checkpoint(str(tmp_path), "auto")
    assert "\n" not in str(error.value)
    if reason.startswith(HOST):
        architectures.check("it", settings, compiled=False)  # PyTorch itself can read


def test_what_cannot_even_be_made_is_refused_in_a_sentence(tmp_path):
    """A package that is missing, tokenizers without their files, models without a vocabulary."""
    expected = {
        "layoutlmv2": "of which transformers makes no model .ImportError.*detectron2",
        "esm": "of which transformers makes no model .TypeError",  # its default has no vocabulary
        "markuplm": "cannot be read: its tokenizer is not there, or not whole .TypeError",
        "tapas": "XLA has not its operations scatter_reduce.two",
    }
    for kind, message in expected.items():
        AutoConfig.for_model(kind).save_pretrained(tmp_path / kind)
        with pytest.raises(InputError, match=message) as error:
            encoder_files.open_checkpoint(str(tmp_path / kind), "auto")
        assert "\n" not in str(error.value)
    AutoConfig.for_model("canine").save_pretrained(tmp_path / "canine")
    tokenizer = encoder_files.open_checkpoint(str(tmp_path / "canine"), "auto").tokenizer
    with pytest.raises(InputError, match="CanineTokenizer is not a fast tokenizer"):
        glue.Encoded(glue.read("synthetic", "sst2", "train"), tokenizer, 32)


def test_a_model_that_changes_in_its_first_step_is_refused():
    with pytest.raises(InputError, match="replaces BigBirdBlockSparseAttention by BigBirdSelfAttention in its first"):
        architectures.check("it", settings_of("big_bird", attention_type="block_sparse"))


def test_a_decoder_and_attention_with_a_bias_of_its_own_are_refused():
    with pytest.raises(InputError, match="is a bert, in which no token sees the next"):
        architectures.check("it", settings_of("bert", is_decoder=True))
    attention = SimpleNamespace()
    architectures.refuse_more(attention, {"sliding_window": 4, "output_attentions": False, "head_mask": None})
    with pytest.raises(InputError, match="gives its attention position_bias, which"):
        encoder_layers.attend(attention, *[torch.zeros(1, 1, 2, 4)] * 3, None, position_bias=torch.zeros(1, 1, 2, 2))


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


def test_positions_begin_after_the_paddings_or_at_0():
    found = {kind: architectures.positions(new(kind)) for kind in ("bert", "data2vec-text", "mpnet", "roberta", "esm")}
    assert found == {"bert": 40, "data2vec-text": 38, "mpnet": 38, "roberta": 38, "esm": float("inf")}
    # What is built counts, and not what the configuration says.
    model = new("data2vec-text", max_position_embeddings=34)
    model.config.max_position_embeddings = 512
    assert architectures.positions(model) == 32


@each_that_runs
def test_norms_and_biases_do_not_decay_as_in_transformers_trainer(kind):
    for model in (new(kind), encoder_layers.fast_layers(new(kind))):
        expected = transformers.Trainer.get_decay_parameter_names(None, model)
        decayed, exempt = architectures.parameter_groups(model, 0.1)
        ids = {id(parameter) for parameter in decayed["params"]}
        found = {name for name, parameter in model.named_parameters() if id(parameter) in ids}
        assert found == {name for name in expected if name in dict(model.named_parameters())}
        assert exempt["weight_decay"] == 0.0 and len(exempt["params"]) > 4
    norms = [module for module in model.modules() if architectures.is_norm(module)]
    of_norms = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    assert not of_norms & ids


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
    x, product = torch.randn(shape), nn.Linear(24, 7)
    found = layers.linear(x, product.weight, product.bias)
    torch.testing.assert_close(found, product(x))


def test_a_norm_over_several_dimensions_stays():
    model = nn.Sequential(nn.LayerNorm((4, 6)), nn.LayerNorm(6))
    model.config, model._supports_attention_backend = SimpleNamespace(model_type="bert"), False
    encoder_layers.fast_layers(model)
    assert [type(module) for module in model] == [nn.LayerNorm, layers.LayerNorm]


@pytest.mark.parametrize("kind", QUICK)
def test_an_export_loads_unchanged_and_names_nothing_of_ours(kind, tmp_path):
    model = new(kind)
    ours = encoder_layers.fast_layers(copy.deepcopy(model))
    encoder_files.save(
        str(tmp_path), ours, ours.state_dict(), SimpleNamespace(is_fast=False, save_pretrained=lambda folder: None)
    )
    text = (tmp_path / "config.json").read_text()
    assert encoder_layers.ATTENTION not in text and f'"{architectures.OWN}"' not in text
    again, batch = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval(), batch_of(kind)
    batch.pop("token_type_ids")
    torch.testing.assert_close(again(**batch).logits, model(**batch).logits)
    assert ours.config._attn_implementation in (encoder_layers.ATTENTION, architectures.OWN)  # which goes on as it was


class Indexed(dict):
    """A batch in host memory."""

    def __init__(self, **more):
        ids = torch.randint(0, WORDS, (4, LENGTH), dtype=torch.int32)
        super().__init__(input_ids=ids, token_type_ids=torch.zeros_like(ids), labels=torch.tensor([0, 1, 2, 0]))
        self.update(more)


def test_what_a_batch_indexes_is_checked_on_the_host():
    limits = architectures.limits(new("bert"))
    assert limits == architectures.Limits({"input_ids": WORDS, "token_type_ids": 2, "labels": 3}, POSITIONS)
    limits.check(Indexed())
    limits.check(Indexed(labels=torch.tensor([0.5, -3.0, 9.0, 0.0])))  # of a regression
    for name, wrong, said in (
        ("input_ids", WORDS, f"input_ids has {WORDS} .row 2 of a batch., and the model has {WORDS} of them, 0 to 100"),
        ("input_ids", -1, "input_ids has -1 .row 2"),
        ("token_type_ids", 2, "token_type_ids has 2 .row 2 of a batch., and the model has 2 of them, 0 to 1"),
        ("labels", 3, "labels has 3 .row 2 of a batch., and the model has 3 of them"),
    ):
        batch = Indexed()
        batch[name][2] = wrong
        with pytest.raises(InputError, match=said):
            limits.check(batch)
    with pytest.raises(InputError, match="rows have 41 tokens; the model has 40 positions"):
        limits.check(Indexed(input_ids=torch.zeros(4, 41, dtype=torch.int32)))


def test_types_that_a_model_is_not_given_are_not_checked():
    assert architectures.limits(new("roberta", type_vocab_size=1)).rows == {"input_ids": WORDS, "labels": 3}
    assert architectures.limits(new("distilbert")).rows == {"input_ids": WORDS, "labels": 3}
    assert architectures.limits(new("xlnet")).rows == {"input_ids": WORDS, "labels": 3}  # relations, and no table
    grown = new("bert")
    grown.resize_token_embeddings(WORDS + 3)
    assert architectures.limits(grown).rows["input_ids"] == WORDS + 3


def test_labels_of_a_head_of_words_and_tokens_of_a_table_that_is_no_embedding_are_checked():
    masked = transformers.AutoModelForMaskedLM.from_config(new("bert").config)
    assert architectures.limits(masked).rows["labels"] == WORDS  # not the 3 classes of its configuration
    assert architectures.limits(new("perceiver")).rows == {"input_ids": WORDS, "labels": 3}
