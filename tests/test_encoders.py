"""Compares the encoders, their layers and their files with transformers' own models: parameters,
logits and files are the same.

Losses and gradients are in test_objectives.py.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from models.encoder_files import Checkpoint, Source
from train import glue as glue_script
from train import pretrain
from train.common import device, loading

DENSE = "bert.encoder.layer.1.output.dense.weight"  # one of the encoder's
ROWS = 8
LENGTH = 32
LONGER = 56
EXACT = {"rtol": 1e-5, "atol": 1e-5}  # of numbers between 0.1 and 10, in float32

every_kind = pytest.mark.parametrize("kind", vocabulary.KINDS)


def refused(message: str):
    """Returns a context that expects an InputError with this message."""
    return pytest.raises(InputError, match=message)


# Text and models


@functools.cache
def tokenizer_of(kind: str):
    """Returns a tokenizer of 400 tokens, learned from the synthetic pairs of sentences."""
    examples = glue.read("synthetic", "mrpc", "train")
    return vocabulary.learn([*examples.first, *examples.second], kind, 400)


@functools.cache
def pairs(kind: str) -> glue.Encoded:
    """Returns pairs of sentences of up to LENGTH tokens."""
    examples = glue.read("synthetic", "mrpc", "validation")
    return glue.Encoded(examples, tokenizer_of(kind), LENGTH)


def batch_of(
    kind: str, length: int = LENGTH, rows: Sequence[int] = range(ROWS)
) -> dict[str, Tensor]:
    """Returns these rows of the pairs, padded to `length` tokens."""
    return loading.as_tensors(pairs(kind).batch(np.array(rows), (length,)))


def logits_of(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Returns the logits of transformers' own model, given the inputs that its kind takes."""
    kind = model.config.model_type
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if kind in ("bert", "xlnet"):
        inputs["token_type_ids"] = batch["token_type_ids"]
    if kind == "xlnet":
        inputs["use_mems"] = False
    return model(**inputs).logits


def new(kind: str, head: str) -> PreTrainedModel:
    """Returns transformers' own model without dropout.

    Its weights make it look at everything that it can, biases included.
    """
    settings = encoders.new_configuration(kind, "tiny", tokenizer_of(kind), LONGER)
    torch.manual_seed(0)
    if head == "language":
        return randomized(objectives.language_model(settings, False, None))

    settings.num_labels = 3
    return randomized(transformers.AutoModelForSequenceClassification.from_config(settings))


# Layers


@dataclass
class Description:
    """What the users of a model see of it."""

    model_class: type
    keys: list[str]  # of its state dict, in their order
    training: list[bool]  # of each module
    identities: dict[str, int]  # of each parameter and buffer
    files: dict[str, bytes]  # that it saves


def described(model: PreTrainedModel, folder: Path) -> Description:
    """Describes a model, which it saves in a folder."""
    model.save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return Description(
        model_class=type(model),
        keys=list(model.state_dict()),
        training=[module.training for module in model.modules()],
        identities={name: id(tensor) for name, tensor in tensors},
        files=files,
    )


@every_kind
def test_fast_layers_keep_class_parameters_keys_and_files(kind, tmp_path):
    model = new(kind, "language")
    expected = described(model, tmp_path / "before")

    assert encoder_layers.fast_layers(model) is model

    assert described(model, tmp_path / "after") == expected
    assert {"config.json", "model.safetensors"} <= set(expected.files)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@every_kind
def test_fast_layers_replace_all_that_they_can(kind):
    model = encoder_layers.fast_layers(new(kind, "language"))

    replaced = encoder_layers.REPLACED | two_streams.REPLACED
    left = [type(module) for module in model.modules() if type(module) in replaced]

    assert left == []
    assert any(isinstance(module, layers.LayerNorm) for module in model.modules())


@every_kind
def test_positions_are_the_configurations_and_xlnets_unlimited(kind):
    expected = float("inf") if kind == "xlnet" else LONGER

    assert architectures.positions(new(kind, "classifier")) == expected


@every_kind
def test_padding_stands_at_the_right_but_xlnets_at_the_left(kind):
    mask = batch_of(kind, LONGER)["attention_mask"]

    rows_with_a_first_token = mask[:, 0].sum()
    rows_with_a_last_token = mask[:, -1].sum()

    if kind == "xlnet":
        assert rows_with_a_first_token == 0
        assert rows_with_a_last_token == ROWS
    else:
        assert rows_with_a_first_token == ROWS
        assert rows_with_a_last_token == 0


def with_words_as_padding(batch: dict[str, Tensor], words: int) -> dict[str, Tensor]:
    """Returns the same rows, with words of a vocabulary in place of the padding."""
    shape = batch["input_ids"].shape
    garbage = torch.randint(words // 2, words - 5, shape, dtype=torch.int32)
    disguised = torch.where(batch["attention_mask"] == 1, batch["input_ids"], garbage)
    return {**batch, "input_ids": disguised}


@every_kind
def test_padding_changes_no_logits_whatever_stands_in_it(kind):
    model = new(kind, "classifier")
    padded = batch_of(kind, LONGER)
    disguised = with_words_as_padding(padded, len(tokenizer_of(kind)))
    lengths = pairs(kind).lengths[:ROWS].tolist()
    assert min(lengths) < LENGTH

    alone = []
    for row, length in enumerate(lengths):
        alone.append(logits_of(model, batch_of(kind, length, [row])))
    expected = torch.cat(alone).detach()
    assert expected.std(0).min() > 0.01  # the rows differ

    for packing_parts in (0, 2):  # each part packs its short rows side by side
        quick = fast(model, packing_parts)
        packing = [each for each in quick.modules() if isinstance(each, encoder_layers.ShortRows)]
        assert len(packing) == (1 if packing_parts and kind != "xlnet" else 0)

        for batch in (batch_of(kind), padded, disguised):
            found = classification.compute_logits(quick, batch).detach()
            torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize(
    ("tokens", "packing_parts", "expected"), [(32, 2, 4), (56, 2, 2), (32, 3, 1), (65, 2, 1)]
)
def test_short_rows_are_packed_where_several_fit(tokens, packing_parts, expected):
    assert layers.rows_together(8, tokens, packing_parts) == expected


@pytest.mark.xla
@every_kind
def test_bfloat16_is_about_as_exact_as_autocast_of_transformers(kind, mesh):
    """The error is the root of the mean square of the logits' difference from float64's."""
    model = new(kind, "language")
    batch = batch_of(kind, rows=range(48))
    shown = batch["attention_mask"].bool()
    exact = classification.compute_logits(new(kind, "language").double(), batch)[shown].detach()

    def error(model: PreTrainedModel, device_type: str, batch: dict[str, Tensor]) -> float:
        with torch.no_grad(), torch.autocast(device_type, torch.bfloat16):
            logits = classification.compute_logits(model, batch)
        difference = logits.cpu().double()[shown] - exact
        return difference.square().mean().sqrt().item()

    usual = error(model, "cpu", batch)
    assert 1e-3 < usual / exact.std().item() < 0.1

    found = [error(fast(model), "cpu", batch)]
    if kind in ("bert", "xlnet"):  # the others have BERT's layers
        on_device = device.to_device(fast(model), mesh)
        uploaded = {name: values.to(mesh.device) for name, values in batch.items()}
        found.append(error(on_device, "xla", uploaded))

    assert all(0.2 * usual < each < 1.5 * usual for each in found), found


def gelu_inputs() -> Tensor:
    """Returns numbers of bfloat16: many around 0, and the largest."""
    near = torch.linspace(-9, 9, 20_001)
    far = torch.tensor([-3e38, -1e4, -30.0, 30.0, 1e4, 3e38])
    return torch.cat((near, far)).bfloat16()


@pytest.mark.usefixtures("compiled")
def test_gelu_in_bfloat16_is_exact_but_for_rounding():
    x = gelu_inputs().requires_grad_()
    x_double = gelu_inputs().double().requires_grad_()

    found = encoder_layers.GELU()(x)
    exact = F.gelu(x_double)
    (slope,) = torch.autograd.grad(found.sum(), x)
    (exact_slope,) = torch.autograd.grad(exact.sum(), x_double)

    rounding = 2**-8  # half of the distance between two numbers of bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=4e-6)
    torch.testing.assert_close(slope.double(), exact_slope, rtol=rounding, atol=8e-6)


@pytest.mark.usefixtures("compiled")
def test_gelu_in_float32_is_pytorchs():
    x = gelu_inputs().float()

    assert torch.equal(encoder_layers.GELU()(x), F.gelu(x))


def test_scores_of_xlnets_distances_are_those_of_transformers():
    """Rows have the published length."""
    length = 512
    settings = transformers.XLNetConfig(vocab_size=10, d_model=64, n_layer=1, n_head=2, d_inner=8)
    own = transformers.XLNetModel(settings)
    q = torch.randn(length, 2, 2, 32)
    weight = torch.randn(64, 2, 32)

    sinusoids = own.relative_positional_encoding(length, length, bsz=2)
    keys = torch.einsum("jbh,hnd->jbnd", sinusoids, weight)
    scores = torch.einsum("ibnd,jbnd->bnij", q, keys)
    expected = own.layer[0].rel_attn.rel_shift_bnij(scores, length)

    query_positions = torch.arange(length, dtype=torch.float32)[:, None]
    turned = torch.cat(two_streams.turned(q, weight.chunk(2), query_positions), -1)
    found = torch.einsum("ibnh,jbh->bnij", turned, sinusoids[length:])

    assert expected.std() > 20
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.std().item())


# Published sizes and records

# Devlin et al. 2019, section 3: 110M; Sanh et al. 2019, table 3: 66M; Liu et al. 2019: 125M;
# Yang et al. 2019.
PUBLISHED = [
    ("bert", 30_522, 109.5),
    ("distilbert", 30_522, 66.4),
    ("roberta", 50_265, 124.6),
    ("xlnet", 32_000, 116.7),
]


class Words(list):
    """All that a configuration asks of a tokenizer."""

    pad_token_id = 1
    bos_token_id = 0
    eos_token_id = 2


@pytest.mark.parametrize(("kind", "words", "millions"), PUBLISHED)
def test_sizes_are_those_of_the_published_models(kind, words, millions):
    settings = encoders.new_configuration(kind, "base", Words(range(words)), 512)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(settings)

    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.06)


def test_a_configuration_of_an_unknown_encoder_is_refused():
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


# Checkpoints


def write(kind: str, folder: Path, model: PreTrainedModel | None = None) -> str:
    """Writes a checkpoint of a new language model, or of this one; returns the folder."""
    if model is None:
        model = new(kind, "language")
    model.save_pretrained(folder)
    tokenizer_of(kind).save_pretrained(folder)
    return str(folder)


def classifier(settings, folder: str) -> PreTrainedModel:
    """Loads a classifier of these settings from a checkpoint."""
    model_class = transformers.AutoModelForSequenceClassification
    return encoder_files.load(model_class, settings, Source(folder)).model


def settings_of_bert(folder: str):
    """Returns the configuration of a BERT's checkpoint."""
    return encoder_files.open_checkpoint(folder, "bert").config


@every_kind
def test_a_checkpoint_gives_its_encoder_to_a_new_classifier(kind, tmp_path):
    folder = write(kind, tmp_path / "of")

    encoder_files.open_checkpoint(folder, kind)
    checkpoint = encoder_files.open_checkpoint(folder, "auto")
    settings = checkpoint.config
    assert checkpoint.source == Source(folder)
    assert settings.model_type == kind
    assert checkpoint.tokenizer.padding_side == tokenizer_of(kind).padding_side

    settings.num_labels = 3
    model = classifier(settings, folder)
    assert isinstance(model, type(new(kind, "classifier")))
    assert model.num_labels == 3
    written = new(kind, "language").base_model.state_dict()
    loaded = model.base_model.state_dict()
    assert equal({name: loaded[name] for name in written}, written)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    folder = write("bert", tmp_path / "of")
    settings = settings_of_bert(folder)
    classifier(settings, folder)  # a masked LM has no pooler, which nobody misses

    path = tmp_path / "of/model.safetensors"
    weights = safetensors.torch.load_file(path)
    del weights[DENSE]
    safetensors.torch.save_file(weights, path, {"format": "pt"})

    with refused(f"checkpoint {folder} lacks 1 weights of its encoder, such as {DENSE}"):
        classifier(settings, folder)


def cut_off(path: Path) -> None:
    """Leaves the first 1,000 bytes of a file."""
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("damage", [cut_off, Path.unlink])
def test_a_checkpoint_that_cannot_be_read_is_refused(damage, tmp_path):
    folder = write("bert", tmp_path / "of")
    settings = settings_of_bert(folder)

    damage(tmp_path / "of/model.safetensors")

    with refused(f"checkpoint {folder} cannot be read"):
        classifier(settings, folder)


def test_a_head_for_another_number_of_labels_is_new(tmp_path):
    of_three = new("bert", "classifier")
    folder = write("bert", tmp_path / "of", of_three)
    settings = settings_of_bert(folder)
    kept = classifier(settings, folder).classifier.weight
    torch.testing.assert_close(kept, of_three.classifier.weight)

    settings.num_labels = 2
    of_two = classifier(settings, folder)

    assert of_two.classifier.weight.shape[0] == 2
    torch.testing.assert_close(of_two.state_dict()[DENSE], of_three.state_dict()[DENSE])


def test_a_checkpoint_of_an_encoder_of_another_shape_is_refused(tmp_path):
    folder = write("bert", tmp_path / "of", new("bert", "classifier"))
    settings = settings_of_bert(folder)

    settings.num_labels = 2  # a head of another shape is none of the reasons
    settings.intermediate_size //= 2

    with refused(f"checkpoint {folder} has bert.encoder.* in another shape"):
        classifier(settings, folder)


@pytest.mark.parametrize("extra", [-1, encoder_files.PADDED_VOCABULARY])
def test_a_tokenizer_of_another_size_is_refused(extra, tmp_path):
    words = len(tokenizer_of("bert"))
    tokenizer_of("bert").save_pretrained(tmp_path)
    transformers.BertConfig(vocab_size=words + extra).save_pretrained(tmp_path)

    with refused(f"{tmp_path} has a model of {words + extra} tokens and a tokenizer of {words}"):
        encoder_files.open_checkpoint(str(tmp_path), "bert")


@pytest.mark.parametrize("extra", [0, encoder_files.PADDED_VOCABULARY - 1])
def test_a_vocabulary_may_be_padded(extra, tmp_path):
    words = len(tokenizer_of("bert"))
    tokenizer_of("bert").save_pretrained(tmp_path)
    transformers.BertConfig(vocab_size=words + extra).save_pretrained(tmp_path)

    settings = encoder_files.open_checkpoint(str(tmp_path), "bert").config

    assert settings.vocab_size >= words


def open_like_mdeberta(tokens: int, folder: Path, monkeypatch) -> Checkpoint:
    """Opens a checkpoint of so many tokens with as large a tokenizer as mDeBERTa's.

    Its model has 251,000 tokens, and its tokenizer 250,102.
    """
    tokenizer_of("bert").save_pretrained(folder)
    settings = transformers.BertConfig(
        vocab_size=tokens,
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=16,
    )
    settings.save_pretrained(folder)

    tokenizer_class = type(transformers.AutoTokenizer.from_pretrained(folder))
    monkeypatch.setattr(tokenizer_class, "__len__", lambda _: 250_102)
    return encoder_files.open_checkpoint(str(folder), "bert")


def test_a_large_vocabulary_may_be_padded_further(tmp_path, monkeypatch):
    open_like_mdeberta(251_000, tmp_path, monkeypatch)


def test_a_large_vocabulary_of_another_size_is_refused(tmp_path, monkeypatch):
    with refused("a tokenizer of 250102; they do not belong together"):
        open_like_mdeberta(252_000, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "value"), [("clamp_len", 8), ("bi_data", True), ("attn_type", "uni")]
)
def test_an_xlnet_with_other_distances_is_refused(name, value, tmp_path):
    model = new("xlnet", "language")
    setattr(model.config, name, value)

    with refused(f"{name}={value!r}; expected"):
        encoder_layers.fast_layers(model)

    model.config.save_pretrained(tmp_path)
    with refused(f"{name}={value!r}; expected"):
        encoder_files.open_checkpoint(str(tmp_path), "xlnet")


def test_the_next_sentence_needs_two_types_of_tokens():
    settings = encoders.new_configuration("bert", "tiny", tokenizer_of("bert"), LENGTH)
    objectives.language_model(settings, True, None)

    settings.type_vocab_size = 1

    with refused("--next-sentence needs a BERT with 2 types of tokens; .* is 1"):
        objectives.language_model(settings, True, None)


# Fine-tuning of a checkpoint of any architecture


def folder_of(model_type: str, folder: Path, **settings) -> str:
    """Writes a checkpoint of two layers with the trial's BERT tokenizer; returns its folder."""
    tokenizer = tokenizer_of("bert")
    common = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    config = transformers.AutoConfig.for_model(model_type, **common | settings)

    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def auto(checkpoint: str, **more) -> glue_script.Config:
    """Returns the configuration of a trial that fine-tunes a checkpoint."""
    return replace(glue_script.TINY, model="auto", checkpoint=checkpoint, task="mrpc", **more)


@torch.no_grad()
def logits_by_row(model: PreTrainedModel, examples: glue.Examples) -> Tensor:
    """Returns the logits of pairs of sentences, which transformers' own model gets one by one."""
    logits = []
    for pair in zip(examples.first, examples.second, strict=True):
        row = tokenizer_of("bert")(*pair, truncation=True, max_length=32, return_tensors="pt")
        outputs = model(input_ids=row["input_ids"], attention_mask=row["attention_mask"])
        logits.append(outputs.logits)
    return torch.cat(logits)


@pytest.mark.xla
@pytest.mark.parametrize("pooling", ["mean", pytest.param("late", marks=pytest.mark.slow)])
def test_rows_without_an_example_change_neither_metrics_nor_loss(pooling, tmp_path, monkeypatch):
    """40 examples in batches of 16: the last has 8, in training and in evaluation.

    EuroBERT's mean is of the mask.
    """
    fewer_sentences(monkeypatch, (40, 40))
    checkpoint = folder_of("eurobert", tmp_path / "of", classifier_pooling=pooling)
    config = auto(
        checkpoint,
        lengths=(32,),
        batch_size=16,
        epochs=1,
        lr=1e-3,
        log_every=1,
        runs=str(tmp_path),
        name="run",
    )

    metrics = glue_script.main(config)

    assert len(losses(tmp_path / "run")) == 3
    assert np.isfinite(losses(tmp_path / "run")).all()
    model_class = transformers.AutoModelForSequenceClassification
    model = model_class.from_pretrained(tmp_path / "run/export").eval()
    examples = glue.read("synthetic", "mrpc", "validation")
    logits = logits_by_row(model, examples)
    expected = glue.score("mrpc", logits.argmax(1).numpy(), examples.labels)
    expected["loss"] = F.cross_entropy(logits, torch.tensor(examples.labels)).item()
    assert metrics == pytest.approx(expected, rel=1e-4)


def test_rows_longer_than_the_built_models_positions_are_refused(tmp_path):
    """data2vec's positions begin after the padding's: of a table of 34, with the padding 0, 33
    remain."""
    checkpoint = folder_of("data2vec-text", tmp_path / "of", max_position_embeddings=34)
    config = glue_script.validate(auto(checkpoint, lengths=(33,)))
    assert glue_script.open_data(config).model.config.model_type == "data2vec-text"

    with refused("--lengths go up to 34; the model has 33 positions"):
        glue_script.open_data(replace(config, lengths=(34,)))


def test_a_token_outside_of_the_models_table_is_refused(tmp_path, mesh):
    """It is refused on the host.

    The tokenizer's numbers have a hole: it has as many tokens as the model has rows, and one number
    is above.
    """
    folder = Path(folder_of("bert", tmp_path / "of"))
    description = json.loads((folder / "tokenizer.json").read_text())
    words = description["model"]["vocab"]
    assert "the" in words
    too_large = len(words) + 7
    words["the"] = too_large
    (folder / "tokenizer.json").write_text(json.dumps(description))

    config = glue_script.validate(auto(str(folder), lengths=(32,)))
    data = glue_script.open_data(config)

    where = r"row \d+ of a batch"
    with refused(f"input_ids has {too_large} .{where}., and the model has {len(words)} of them"):
        glue_script.check_evaluation(data, config, mesh)


# Exports

LONG_TEXT = "the dog, one of six, then " * 40
EXPORTED_KINDS = ["bert", "distilbert", "roberta", "fairseq-roberta", "xlnet"]


@dataclass
class Export:
    """A folder, and the kind of the model that it has."""

    kind: str
    folder: Path


@pytest.fixture(scope="module", params=EXPORTED_KINDS)
def export(request, mesh, tmp_path_factory) -> Export:
    """A trial's model, not trained, as train.glue exports it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("export")
    config = glue_script.validate(replace(glue_script.TINY, model=request.param))
    data = glue_script.open_data(config)
    state = glue_script.State(encoder_layers.fast_layers(data.model), None)
    glue_script.export(str(folder), state, data, config, mesh)
    return Export(kind=request.param, folder=folder)


def test_a_pipeline_cuts_a_long_text_to_what_the_model_takes(export):
    classify = transformers.pipeline("text-classification", model=str(export.folder), device="cpu")
    assert classify.tokenizer.model_max_length == (512 if export.kind == "xlnet" else 32)

    (answer,) = classify([LONG_TEXT], truncation=True)

    assert answer["label"] in ("negative", "positive")


def test_an_export_is_written_and_read_without_progress_bars(export, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", True)

    checkpoint = encoder_files.open_checkpoint(str(export.folder), "auto")
    auto_class = transformers.AutoModelForSequenceClassification
    model = encoder_files.load(auto_class, checkpoint.config, checkpoint.source).model
    encoder_files.save(str(tmp_path), model, model.state_dict(), checkpoint.tokenizer)

    assert capfd.readouterr().err == ""
    transformers.AutoModel.from_pretrained(export.folder)  # transformers itself has them
    assert "Loading weights" in capfd.readouterr().err


def test_the_tokenizer_of_an_export_cuts_no_text_by_itself(export):
    """Other programs read this file, and cut by themselves."""
    alone = tokenizers.Tokenizer.from_file(str(export.folder / "tokenizer.json"))

    assert alone.truncation is None
    assert len(alone.encode(LONG_TEXT).ids) > 200


def test_an_export_does_not_name_our_attention(export):
    assert encoder_layers.ATTENTION not in (export.folder / "config.json").read_text()


def test_rows_longer_than_an_export_takes_are_refused(export):
    tokenizer = transformers.AutoTokenizer.from_pretrained(export.folder)
    examples = glue.read("synthetic", "sst2", "validation")

    if export.kind == "xlnet":  # which takes 512 tokens
        glue.Encoded(examples, tokenizer, 40)
    else:
        with refused("max_length is 40; expected .* to 32"):
            glue.Encoded(examples, tokenizer, 40)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlnet"])
def test_what_was_pretrained_says_how_long_a_text_it_takes(kind, tmp_path, mesh):
    config = pretrain.validate(replace(pretrain.TINY, model=kind))
    data = pretrain.open_data(config)
    state = pretrain.State(encoder_layers.fast_layers(data.model), None, None)

    pretrain.export(str(tmp_path / "export"), state, data, config, mesh)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    expected = 512 if kind == "xlnet" else pretrain.SYNTHETIC_LENGTH
    assert tokenizer.model_max_length == expected
    assert data.train.text.tokenizer.model_max_length == 512  # of the data, which is as it was
