"""models/fairseq.py on files that fairseq wrote (the golden ones), on our own, on older ones, and
on what is none."""

import argparse
import copy
import io
import pickle
import re
import warnings
from dataclasses import replace

import pytest
import torch
from helpers import equal
from model_helpers import GOLDEN, WORDS, checkpoint, joined, transformer_of
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from errors import InputError
from models import fairseq
from models.transformer import Architecture, Transformer

SMALL = Architecture(
    dim=12,
    ffn_dim=20,
    heads=3,
    encoder_layers=1,
    decoder_layers=2,
    dropout=0.2,
    max_positions=30,
)
NAME = "some/folder/model.pt"


def content(state: object, **options) -> bytes:
    """Returns what torch.save writes."""
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def read(name: str) -> tuple[dict, dict[str, Tensor]]:
    """Returns the settings and the weights of a golden file."""
    return fairseq.read_checkpoint((GOLDEN / name).read_bytes(), NAME)


def load(file: bytes, words: tuple[int, int]) -> Transformer:
    settings, weights = fairseq.read_checkpoint(file, NAME)
    return transformer_of(settings, weights, words, NAME)


def refused(message: str):
    """Expects an InputError of one short line that names the file."""
    one_line = r"(?=[^\n\x1b]{,250}\Z)"
    return pytest.raises(InputError, match=rf"^{one_line}{NAME}.*{message}")


# ---- reading and writing -----------------------------------------------------------------------
ARCHITECTURES = {
    "trained.pt": Architecture(
        dim=32, ffn_dim=64, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.1
    ),
    "prenorm.pt": Architecture(
        dim=32,
        ffn_dim=64,
        heads=4,
        encoder_layers=2,
        decoder_layers=2,
        dropout=0.1,
        pre_norm=True,
        share_embeddings="none",
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fairseqs_files_are_read_with_their_settings(name):
    settings, weights = read(name)

    assert fairseq.architecture(settings, weights, NAME) == ARCHITECTURES[name]
    expected = {}
    for key, value in checkpoint(name)["model"].items():
        if not key.endswith(".version"):
            expected[key] = value
    assert equal(weights, expected)

    model = Transformer(ARCHITECTURES[name], *WORDS[name])
    fairseq.load_weights(model, weights, NAME)
    assert equal(model.state_dict(), weights)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_files_are_written_as_fairseq_does(tmp_path, name):
    settings, weights = read(name)
    model = Transformer(ARCHITECTURES[name], *WORDS[name])

    file = fairseq.write_checkpoint(model, weights, 17, source_lang=None, target_lang=None)

    (tmp_path / name).write_bytes(file)
    written = checkpoint(name, tmp_path)
    tensors = {}
    for key, value in written["model"].items():
        if "_float_tensor" not in key:
            tensors[key] = value
    assert equal(tensors, checkpoint(name)["model"])
    written_settings = vars(written["args"]) | {"lr": settings["lr"]}
    assert written_settings == {key: settings.get(key) for key in written_settings}


@pytest.mark.parametrize("share", ["all", "decoder", "none"])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_what_is_written_is_read_bit_by_bit(share, pre_norm):
    arch = replace(
        SMALL,
        share_embeddings=share,
        pre_norm=pre_norm,
        attention_dropout=0.1,
        activation_dropout=0.05,
    )
    words = (11, 11) if share == "all" else (11, 13)
    model = Transformer(arch, *words)
    expected = model.state_dict()

    file = fairseq.write_checkpoint(model, expected, 17, source_lang="en", target_lang="de")

    settings, weights = fairseq.read_checkpoint(file, NAME)
    assert fairseq.architecture(settings, weights, NAME) == arch
    assert settings["source_lang"] == "en"
    assert settings["target_lang"] == "de"
    assert equal(weights, expected)
    loaded = load(file, words)
    assert equal(loaded.state_dict(), weights)
    decoder = loaded.decoder
    is_tied = decoder.output_projection.weight is decoder.embed_tokens.weight
    assert is_tied == (share != "none")


# ---- older files -------------------------------------------------------------------------------
NORMS_OF_2018 = {
    "encoder": ("self_attn", "final"),
    "decoder": ("self_attn", "encoder_attn", "final"),
}


def old_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state_dict as fairseq of 2018 wrote it, with entries that are no weights."""
    old = joined(weights)
    for stack, norms in NORMS_OF_2018.items():
        for number, norm in enumerate(norms):
            todays = re.compile(rf"^({stack}\..*){norm}_layer_norm")
            new_name = rf"\1layer_norms.{number}"
            old = {todays.sub(new_name, name): value for name, value in old.items()}
        old[f"{stack}.version"] = torch.ones(1)
        old[f"{stack}.embed_positions.weights"] = torch.zeros(1026, 32)

    projection = old.pop("decoder.output_projection.weight")
    is_shared = torch.equal(projection, old["decoder.embed_tokens.weight"])
    if not is_shared:
        old["decoder.embed_out"] = projection
    return old


@pytest.mark.parametrize(("name", "legacy"), [("trained.pt", False), ("prenorm.pt", True)])
def test_older_names_files_and_half_precision_become_todays(name, legacy):
    """legacy: as torch before 1.6 wrote it, not a zip."""
    settings, weights = read(name)
    half = {key: value.half() for key, value in weights.items()}
    old = old_names(half)
    assert "encoder.layers.0.layer_norms.1.bias" in old
    assert "decoder.layers.1.encoder_attn.in_proj_bias" in old
    assert ("decoder.embed_out" in old) == (name == "prenorm.pt")

    state = {"args": argparse.Namespace(**settings), "model": old}
    file = content(state, _use_new_zipfile_serialization=not legacy)
    found_settings, found_weights = fairseq.read_checkpoint(file, NAME)

    assert found_settings == settings
    assert equal(found_weights, {key: value.float() for key, value in half.items()})
    for value in found_weights.values():
        assert value.dtype == torch.float32


def test_settings_that_a_file_leaves_out_are_fairseqs_defaults():
    assert fairseq.architecture({}, {}, NAME) == Architecture(share_embeddings="none")

    settings = {
        "encoder_embed_dim": 1024,
        "encoder_ffn_embed_dim": 4096,
        "relu_dropout": 0.1,
        "dropout": 0.3,
        "max_source_positions": 256,
        "share_decoder_input_output_embed": True,
    }
    assert fairseq.architecture(settings, {}, NAME) == Architecture(
        dim=1024,
        ffn_dim=4096,
        dropout=0.3,
        activation_dropout=0.1,
        max_positions=256,
        share_embeddings="decoder",
    )


# ---- files that are no checkpoints -------------------------------------------------------------
WEIGHTS = {"a": torch.zeros(2)}
GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
A_MODULE = {"model": nn.Linear(2, 2), "args": argparse.Namespace()}
NO_SETTINGS = {"model": WEIGHTS, "args": None, "cfg": None}
NO_SETTINGS_OF_A_MODEL = {"model": WEIGHTS, "cfg": {"task": {}}}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        pytest.param(b"", "", id="empty"),
        pytest.param(GIT_LFS_POINTER, "", id="pointer"),
        pytest.param(pickle.dumps({"model": {}, "args": None}), "", id="pickle"),
        pytest.param(save_safetensors(WEIGHTS), "", id="safetensors"),
        pytest.param((GOLDEN / "initial.pt").read_bytes()[:-1], "", id="cut"),
        pytest.param(content(A_MODULE), r"holds a torch\.nn\..*\.Linear", id="module"),
        pytest.param(content([1, 2]), 'it has no "model"', id="list"),
        pytest.param(content(WEIGHTS), 'it has no "model"', id="weights"),
        pytest.param(content(NO_SETTINGS), 'neither "args" nor "cfg"', id="no settings"),
        pytest.param(
            content(NO_SETTINGS_OF_A_MODEL),
            'neither "args" nor "cfg"',
            id="settings of no model",
        ),
    ],
)
def test_other_kinds_of_files_and_damaged_ones_are_refused(file, message):
    with refused(message), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what the bytes could mean
        fairseq.read_checkpoint(file, NAME)


class Planted:
    """Writes the file "ran" when it is unpickled."""

    def __reduce__(self):
        return open, ("ran", "w")


def test_a_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planted = content({**checkpoint("initial.pt"), "extra_state": Planted()})
    marker = tmp_path / "ran"

    with refused(r"holds a (\w+\.)?open"):
        fairseq.read_checkpoint(planted, NAME)
    assert not marker.exists()

    torch.load(io.BytesIO(planted), weights_only=False)
    assert marker.exists(), "the trap is one"


# ---- checkpoints of other models ---------------------------------------------------------------
@pytest.mark.parametrize(
    "switch",
    [
        "encoder_learned_pos",
        "decoder_learned_pos",
        "no_token_positional_embeddings",
        "layernorm_embedding",
        "no_scale_embedding",
        "no_cross_attention",
        "cross_self_attention",
        "adaptive_input",
    ],
)
def test_switches_that_this_transformer_lacks_are_refused(switch):
    settings, weights = read("initial.pt")

    with refused(f"{switch} True; .* False only"):
        fairseq.architecture(settings | {switch: True}, weights, NAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_fn": "gelu"}, "activation_fn gelu; .* relu only"),
        ({"adaptive_softmax_cutoff": [1000, 2000]}, "adaptive_softmax_cutoff"),
        ({"quant_noise_pq": 0.1}, "quant_noise_pq"),
        (
            {"decoder_embed_dim": 16},
            "embed_dim 32 in its encoder and 16 in its decoder",
        ),
        ({"decoder_attention_heads": 2}, "attention_heads 4 in its encoder and 2"),
        (
            {"decoder_normalize_before": True},
            "normalize_before False in its encoder and True",
        ),
        (
            {"encoder_normalize_before": True, "decoder_normalize_before": True},
            "not after the last",
        ),
    ],
)
def test_models_that_are_not_this_transformer_are_refused(change, message):
    settings, weights = read("initial.pt")

    with refused(message):
        fairseq.architecture(settings | change, weights, NAME)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("initial.pt", (65, 65), r"encoder\.embed_tokens\.weight has 64 words .* dictionary 65"),
        ("prenorm.pt", (23, 40), r"encoder\.embed_tokens\.weight has 24 words"),
        ("prenorm.pt", (24, 41), r"decoder\.embed_tokens\.weight has 40 words"),
    ],
)
def test_another_dictionary_is_named(name, words, message):
    with refused(f"another dictionary: {message}"):
        load((GOLDEN / name).read_bytes(), words)


@pytest.mark.parametrize(
    "change",
    [
        {"encoder_layers": 3},
        {"decoder_layers": 1},
        {"ffn_dim": 128},
        {"dim": 64},
        {"pre_norm": True},
    ],
)
def test_weights_of_another_architecture_are_refused(change):
    settings, weights = read("initial.pt")
    arch = replace(fairseq.architecture(settings, weights, NAME), **change)
    model = Transformer(arch, 64, 64)
    before = copy.deepcopy(model.state_dict())

    with refused(r"does not fit the model: \S+ and \d+ more tensors differ"):
        fairseq.load_weights(model, weights, NAME)

    assert equal(model.state_dict(), before), "nothing was loaded"
