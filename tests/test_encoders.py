"""The encoders, their layers and their files against transformers' own models: the same parameters, logits and files.
Losses and gradients are in test_objectives.py."""

import contextlib
import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from helpers import equal, fewer_sentences, losses
from model_helpers import fast, randomized
from torch import Tensor
from transformers import PreTrainedModel

from data import glue, vocabulary
from errors import InputError
from models import (
    architectures,
    classification,
    encoder_files,
    encoder_layers,
    encoders,
    layers,
    objectives,
    two_streams,
)
from models.encoder_files import Source
from train import glue as glue_script
from train import pretrain
from train.common import device, loading

DENSE = "bert.encoder.layer.1.output.dense.weight"  # one of the encoder's
ROWS, LENGTH, LONGER = 8, 32, 56
EXACT = {"rtol": 1e-5, "atol": 1e-5}  # of numbers between 0.1 and 10, in float32

every_kind = pytest.mark.parametrize("kind", vocabulary.KINDS)


@functools.cache
def tokenizer_of(kind: str):
    examples = glue.read("synthetic", "mrpc", "train")
    return vocabulary.learn([*examples.first, *examples.second], kind, 400)


@functools.cache
def pairs(kind: str) -> glue.Encoded:
    """Pairs of sentences of up to LENGTH tokens."""
    return glue.Encoded(glue.read("synthetic", "mrpc", "validation"), tokenizer_of(kind), LENGTH)


def batch_of(kind: str, length: int = LENGTH, rows=range(ROWS)) -> dict[str, Tensor]:
    return loading.as_tensors(pairs(kind).batch(np.array(rows), (length,)))


def logits_of(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    kind, inputs = model.config.model_type, {name: batch[name] for name in ("input_ids", "attention_mask")}
    types = {"token_type_ids": batch["token_type_ids"]} if kind in ("bert", "xlnet") else {}
    return model(**inputs, **types, **({"use_mems": False} if kind == "xlnet" else {})).logits


def new(kind: str, head: str) -> PreTrainedModel:
    """transformers' own model, whose weights make it look at everything that it can, biases included; no dropout."""
    settings = encoders.new_configuration(kind, "tiny", tokenizer_of(kind), LONGER)
    torch.manual_seed(0)
    if head == "language":
        return randomized(objectives.language_model(settings, False, None))
    settings.num_labels = 3
    return randomized(transformers.AutoModelForSequenceClassification.from_config(settings))


@every_kind
def test_fast_layers_keep_class_parameters_keys_and_files(kind, tmp_path):
    model = new(kind, "language")

    def described(folder: Path):
        model.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        modes, identities = [module.training for module in model.modules()], {name: id(each) for name, each in tensors}
        return type(model), list(model.state_dict()), modes, identities, files

    expected = described(tmp_path / "before")
    assert encoder_layers.fast_layers(model) is model
    assert described(tmp_path / "after") == expected and {"config.json", "model.safetensors"} <= set(expected[-1])
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    replaced = encoder_layers.REPLACED | two_streams.REPLACED
    left = [type(module) for module in model.modules() if type(module) in replaced]
    assert left == [] and any(isinstance(module, layers.LayerNorm) for module in model.modules())


@every_kind
def test_padding_changes_no_logits_whatever_stands_in_it(kind):
    tokenizer, model, lengths = tokenizer_of(kind), new(kind, "classifier"), pairs(kind).lengths[:ROWS].tolist()
    padded = batch_of(kind, LONGER)
    assert architectures.positions(model) == (float("inf") if kind == "xlnet" else LONGER)
    ends = padded["attention_mask"][:, [0, -1]].sum(0).tolist()
    assert ends == ([0, ROWS] if kind == "xlnet" else [ROWS, 0])
    # The same rows, with words in place of the padding.
    garbage = torch.randint(len(tokenizer) // 2, len(tokenizer) - 5, padded["input_ids"].shape, dtype=torch.int32)
    disguised = {**padded, "input_ids": torch.where(padded["attention_mask"] == 1, padded["input_ids"], garbage)}
    alone = [logits_of(model, batch_of(kind, length, [row])) for row, length in enumerate(lengths)]
    expected = torch.cat(alone).detach()
    assert expected.std(0).min() > 0.01 and min(lengths) < LENGTH  # the rows differ
    for parts in (0, 2):  # of a batch, of which each has its short rows side by side
        quick = fast(model, parts)
        packed = sum(isinstance(module, encoder_layers.ShortRows) for module in quick.modules())
        assert packed == (parts and kind != "xlnet")
        for batch in (batch_of(kind), padded, disguised):
            torch.testing.assert_close(classification.compute_logits(quick, batch).detach(), expected, **EXACT)
    assert [layers.rows_together(8, *each) for each in ((32, 2), (56, 2), (32, 3), (65, 2))] == [4, 2, 1, 1]


@every_kind
def test_bfloat16_is_about_as_exact_as_transformers_under_autocast(kind, mesh):
    """The mean squared error of the logits against float64's."""
    model, batch = new(kind, "language"), batch_of(kind, rows=range(48))
    shown = batch["attention_mask"].bool()
    exact = classification.compute_logits(new(kind, "language").double(), batch)[shown].detach()

    def error(model, place: str, batch) -> float:
        with torch.no_grad(), torch.autocast(place, torch.bfloat16):
            logits = classification.compute_logits(model, batch)
        return (logits.cpu().double()[shown] - exact).square().mean().sqrt().item()

    usual = error(model, "cpu", batch)
    assert 1e-3 < usual / exact.std().item() < 0.1
    found = [error(fast(model), "cpu", batch)]
    if kind in ("bert", "xlnet"):  # the others have BERT's layers
        uploaded = {name: values.to(mesh.device) for name, values in batch.items()}
        found.append(error(device.to_device(fast(model), mesh), "xla", uploaded))
    assert all(0.2 * usual < each < 1.5 * usual for each in found), found


def test_sizes_are_those_of_the_published_models():
    class Words(list):
        pad_token_id, bos_token_id, eos_token_id = 1, 0, 2

    # Devlin et al. 2019, section 3: 110M; Sanh et al. 2019, table 3: 66M; Liu et al. 2019: 125M; Yang et al. 2019.
    published = [("bert", 30_522, 109.5), ("distilbert", 30_522, 66.4), ("roberta", 50_265, 124.6)]
    for kind, words, millions in [*published, ("xlnet", 32_000, 116.7)]:
        settings = encoders.new_configuration(kind, "base", Words(range(words)), 512)
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(settings)
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06), kind
    with pytest.raises(ValueError, match="name is 'gpt2'; it must be bert"):
        encoders.new_configuration("gpt2", "tiny", Words([0]), 16)


@pytest.mark.parametrize("name", encoders.NAMES)
def test_a_record_names_what_is_there(name):
    record = encoders.by_name(name)
    assert record.tokenizer in vocabulary.KINDS
    assert record.architecture in (record.published.model_type, "")
    assert record.teacher in ("", *encoders.NAMES)
    assert callable(objectives.of_encoder(name).forward)
    assert set(record.pretraining_of_size) <= set(encoders.SIZES)
    recipes = [record.fine_tuning, record.pretraining, *record.pretraining_of_size.values()]
    assert all(recipe.source for recipe in recipes)


def test_what_is_published_is_a_copy_that_may_be_changed():
    encoders.published("bert").num_labels = 7
    assert encoders.published("bert").num_labels == 2


def write(kind: str, folder: Path, model: PreTrainedModel | None = None) -> str:
    (model or new(kind, "language")).save_pretrained(folder)
    tokenizer_of(kind).save_pretrained(folder)
    return str(folder)


def classifier(settings, folder: str) -> PreTrainedModel:
    return encoder_files.load(transformers.AutoModelForSequenceClassification, settings, Source(folder)).model


@every_kind
def test_a_checkpoint_gives_its_encoder_to_a_new_classifier(kind, tmp_path):
    folder = write(kind, tmp_path / "of")
    for model in (kind, "auto"):
        checkpoint = encoder_files.open_checkpoint(folder, model)
    settings = checkpoint.config
    assert checkpoint.source == Source(folder) and settings.model_type == kind
    assert checkpoint.tokenizer.padding_side == tokenizer_of(kind).padding_side
    settings.num_labels = 3
    model = classifier(settings, folder)
    assert isinstance(model, type(new(kind, "classifier"))) and model.num_labels == 3
    encoder, found = (each.base_model.state_dict() for each in (new(kind, "language"), model))
    assert equal({name: found[name] for name in encoder}, encoder)


def refused(message: str):
    return pytest.raises(InputError, match=message)


def test_a_checkpoint_that_is_incomplete_or_cannot_be_read_is_refused(tmp_path):
    folder, path = write("bert", tmp_path / "of"), tmp_path / "of/model.safetensors"
    settings = encoder_files.open_checkpoint(folder, "bert").config
    classifier(settings, folder)  # a masked LM has no pooler, which nobody misses
    weights = safetensors.torch.load_file(path)
    del weights[DENSE]
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    with refused(f"checkpoint {folder} lacks 1 weights of its encoder, such as {DENSE}"):
        classifier(settings, folder)
    for damage in (lambda: path.write_bytes(path.read_bytes()[:1000]), path.unlink):
        damage()
        with refused(f"checkpoint {folder} cannot be read"):
            classifier(settings, folder)


def test_a_head_for_another_number_of_labels_is_new_and_misshapen_encoders_are_refused(tmp_path):
    of_three = new("bert", "classifier")
    folder = write("bert", tmp_path / "of", of_three)
    settings = encoder_files.open_checkpoint(folder, "bert").config
    torch.testing.assert_close(classifier(settings, folder).classifier.weight, of_three.classifier.weight)
    settings.num_labels = 2
    of_two = classifier(settings, folder)
    assert of_two.classifier.weight.shape[0] == 2
    torch.testing.assert_close(of_two.state_dict()[DENSE], of_three.state_dict()[DENSE])
    settings.intermediate_size //= 2
    with refused(f"checkpoint {folder} has bert.encoder.* in another shape"):
        classifier(settings, folder)


@pytest.mark.parametrize("more", [1, -encoder_files.PADDED_VOCABULARY])
def test_a_tokenizer_of_another_size_is_refused_and_a_padded_vocabulary_is_not(more, tmp_path):
    folder, words = tmp_path / "of", len(tokenizer_of("bert"))
    tokenizer_of("bert").save_pretrained(folder)
    transformers.BertConfig(vocab_size=words - more).save_pretrained(folder)
    with refused(f"{folder} has a model of {words - more} tokens and a tokenizer of {words}"):
        encoder_files.open_checkpoint(str(folder), "bert")
    transformers.BertConfig(vocab_size=words - more + (1 if more > 0 else -1)).save_pretrained(folder)
    assert encoder_files.open_checkpoint(str(folder), "bert").config.vocab_size >= words


@pytest.mark.parametrize(("tokens", "fits"), [(251_000, True), (252_000, False)])
def test_a_large_vocabulary_may_be_padded_further(tokens, fits, tmp_path, monkeypatch):
    """mDeBERTa's model has 251,000 tokens, and its tokenizer 250,102."""
    tokenizer_of("bert").save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    transformers.BertConfig(vocab_size=tokens, **sizes).save_pretrained(tmp_path)
    kind = type(transformers.AutoTokenizer.from_pretrained(tmp_path))
    monkeypatch.setattr(kind, "__len__", lambda _: 250_102)
    with contextlib.nullcontext() if fits else refused("a tokenizer of 250102; they do not belong together"):
        encoder_files.open_checkpoint(str(tmp_path), "bert")


@pytest.mark.usefixtures("compiled")
def test_gelu_in_bfloat16_is_exact_but_for_rounding_and_in_float32_pytorchs():
    x = torch.cat((torch.linspace(-9, 9, 20_001), torch.tensor([-3e38, -1e4, -30.0, 30.0, 1e4, 3e38]))).bfloat16()
    inputs, ours = [x, x.double()], encoder_layers.GELU()
    found, exact = (function(leaf.requires_grad_()) for function, leaf in zip((ours, F.gelu), inputs, strict=True))
    slope, exact_slope = (torch.autograd.grad(y.sum(), leaf)[0] for y, leaf in zip((found, exact), inputs, strict=True))
    rounding = 2**-8  # half of the distance between two numbers of bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=4e-6)
    torch.testing.assert_close(slope.double(), exact_slope, rtol=rounding, atol=8e-6)
    assert torch.equal(ours(x.float()), F.gelu(x.float()))


def test_scores_of_xlnets_distances_are_transformers_in_rows_of_published_length():
    settings = transformers.XLNetConfig(vocab_size=10, d_model=64, n_layer=1, n_head=2, d_inner=8)
    length, own = 512, transformers.XLNetModel(settings)
    q, weight = torch.randn(length, 2, 2, 32), torch.randn(64, 2, 32)
    sinusoids = own.relative_positional_encoding(length, length, bsz=2)
    scores = torch.einsum("ibnd,jbnd->bnij", q, torch.einsum("jbh,hnd->jbnd", sinusoids, weight))
    expected = own.layer[0].rel_attn.rel_shift_bnij(scores, length)
    turned = two_streams.turned(q, weight.chunk(2), torch.arange(length, dtype=torch.float32)[:, None])
    found = torch.einsum("ibnh,jbh->bnij", torch.cat(turned, -1), sinusoids[length:])
    assert expected.std() > 20
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.std().item())


def test_an_xlnet_with_other_distances_is_refused(tmp_path):
    for name, value in (("clamp_len", 8), ("bi_data", True), ("attn_type", "uni")):
        model = new("xlnet", "language")
        setattr(model.config, name, value)
        with pytest.raises(InputError, match=f"{name}={value!r}; expected"):
            encoder_layers.fast_layers(model)
        model.config.save_pretrained(tmp_path)
        with pytest.raises(InputError, match=f"{name}={value!r}; expected"):
            encoder_files.open_checkpoint(str(tmp_path), "xlnet")


def folder_of(model_type: str, folder: Path, **settings) -> str:
    """A checkpoint of two layers with the trial's BERT tokenizer."""
    tokenizer = tokenizer_of("bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": 2, "eos_token_id": 3}
    config = transformers.AutoConfig.for_model(model_type, **sizes | words | settings)
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def auto(checkpoint: str, **more) -> glue_script.Config:
    return replace(glue_script.TINY, model="auto", checkpoint=checkpoint, task="mrpc", **more)


@pytest.mark.parametrize("pooling", ["mean", "late"])
def test_rows_without_an_example_change_neither_metrics_nor_loss(pooling, tmp_path, monkeypatch):
    """40 examples in batches of 16: the last has 8, in training and in evaluation. EuroBERT's mean is of the mask."""
    fewer_sentences(monkeypatch, (40, 40))
    checkpoint = folder_of("eurobert", tmp_path / "of", classifier_pooling=pooling)
    config = auto(checkpoint, lengths=(32,), batch_size=16, epochs=1, lr=1e-3, log_every=1, runs=str(tmp_path))
    metrics = glue_script.main(replace(config, name="run"))
    assert len(losses(tmp_path / "run")) == 3 and np.isfinite(losses(tmp_path / "run")).all()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/export").eval()
    examples = glue.read("synthetic", "mrpc", "validation")
    logits = []
    for pair in zip(examples.first, examples.second, strict=True):
        row = tokenizer_of("bert")(*pair, truncation=True, max_length=32, return_tensors="pt")
        with torch.no_grad():
            logits.append(model(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).logits)
    logits, labels = torch.cat(logits), torch.tensor(examples.labels)
    expected = glue.score("mrpc", logits.argmax(1).numpy(), examples.labels)
    assert metrics == pytest.approx(expected | {"loss": F.cross_entropy(logits, labels).item()}, rel=1e-4)


def test_rows_that_are_longer_than_the_built_models_positions_are_refused(tmp_path):
    """data2vec's positions begin after the padding's: of a table of 34, with the padding 0, 33 remain."""
    checkpoint = folder_of("data2vec-text", tmp_path / "of", max_position_embeddings=34)
    config = glue_script.validate(auto(checkpoint, lengths=(33,)))
    assert glue_script.open_data(config).model.config.model_type == "data2vec-text"
    with refused("--lengths go up to 34; the model has 33 positions"):
        glue_script.open_data(replace(config, lengths=(34,)))


def test_a_token_outside_of_the_models_table_is_refused_on_the_host(tmp_path, mesh):
    """A tokenizer whose numbers have a hole: as many tokens as the model has rows, and one number is above."""
    folder = Path(folder_of("bert", tmp_path / "of"))
    description = json.loads((folder / "tokenizer.json").read_text())
    words = description["model"]["vocab"]
    assert "the" in words
    words["the"] = len(words) + 7
    (folder / "tokenizer.json").write_text(json.dumps(description))
    config = glue_script.validate(auto(str(folder), lengths=(32,)))
    data = glue_script.open_data(config)
    with refused(rf"input_ids has {len(words) + 7} .row \d+ of a batch., and the model has {len(words)} of them"):
        glue_script.check_evaluation(data, config, mesh)


def export(kind: str, folder: Path, mesh: device.Mesh) -> str:
    """A trial's model, not trained, as train.glue exports it."""
    config = glue_script.validate(replace(glue_script.TINY, model=kind))
    data = glue_script.open_data(config)
    state = glue_script.State(encoder_layers.fast_layers(data.model), None)
    glue_script.export(str(folder), state, data, mesh)
    return str(folder)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "fairseq-roberta", "xlnet"])
def test_a_pipeline_cuts_a_long_text_to_what_the_model_takes(kind, tmp_path, mesh):
    folder = export(kind, tmp_path / "export", mesh)
    classify = transformers.pipeline("text-classification", model=folder, device="cpu")
    assert classify.tokenizer.model_max_length == (512 if kind == "xlnet" else 32)
    (answer,) = classify(["the dog, one of six, then " * 40], truncation=True)
    assert answer["label"] in ("negative", "positive")
    alone = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")  # for other programs, which cut by themselves
    assert alone.truncation is None and len(alone.encode("the dog, one of six, then " * 40).ids) > 200
    assert encoder_layers.ATTENTION not in (tmp_path / "export/config.json").read_text()
    with refused("max_length is 40; expected .* to 32") if kind != "xlnet" else contextlib.nullcontext():
        glue.Encoded(glue.read("synthetic", "sst2", "validation"), classify.tokenizer, 40)


def test_the_next_sentence_needs_two_types_of_tokens():
    settings = encoders.new_configuration("bert", "tiny", tokenizer_of("bert"), LENGTH)
    objectives.language_model(settings, True, None)
    settings.type_vocab_size = 1
    with refused("--next-sentence needs a BERT with 2 types of tokens; .* is 1"):
        objectives.language_model(settings, True, None)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlnet"])
def test_what_was_pretrained_says_how_long_a_text_it_takes(kind, tmp_path, mesh):
    config = pretrain.validate(replace(pretrain.TINY, model=kind))
    data = pretrain.open_data(config)
    state = pretrain.State(encoder_layers.fast_layers(data.model), None, None)
    pretrain.export(str(tmp_path / "export"), state, data, config, mesh)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.model_max_length == (512 if kind == "xlnet" else pretrain.SYNTHETIC_LENGTH)
    assert data.train.text.tokenizer.model_max_length == 512  # of the data, which is as it was
