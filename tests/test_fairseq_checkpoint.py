"""models/fairseq.py on files that fairseq wrote (the golden ones), on our own, on older ones, and on what is none."""

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

ARCH = Architecture(dim=12, ffn_dim=20, heads=3, encoder_layers=1, decoder_layers=2, dropout=0.2, max_positions=30)
NAME = "some/folder/model.pt"
SWITCHES = ["encoder_learned_pos", "decoder_learned_pos", "no_token_positional_embeddings", "layernorm_embedding"]
SWITCHES += ["no_scale_embedding", "no_cross_attention", "cross_self_attention", "adaptive_input"]


def content(state: object, **options) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def read(name: str) -> tuple[dict, dict[str, Tensor]]:
    return fairseq.read_checkpoint((GOLDEN / name).read_bytes(), NAME)


def load(file: bytes, words: tuple[int, int]) -> Transformer:
    return transformer_of(*fairseq.read_checkpoint(file, NAME), words, NAME)


def refused(message: str):
    """Expects an InputError of one short line that names the file."""
    return pytest.raises(InputError, match=rf"^(?=[^\n\x1b]{{,250}}\Z){NAME}.*{message}")


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("trained.pt", Architecture(32, 64, 4, 2, 2, dropout=0.1)),
        ("prenorm.pt", Architecture(32, 64, 4, 2, 2, dropout=0.1, pre_norm=True, share_embeddings="none")),
    ],
)
def test_fairseqs_files_are_read_with_their_settings_and_written_as_fairseq_does(tmp_path, name, arch):
    (settings, weights), theirs = read(name), checkpoint(name)
    assert fairseq.architecture(settings, weights, NAME) == arch
    assert equal(weights, {key: value for key, value in theirs["model"].items() if not key.endswith(".version")})
    model = Transformer(arch, *WORDS[name])
    fairseq.load_weights(model, weights, NAME)
    assert equal(model.state_dict(), weights)
    file = fairseq.write_checkpoint(model, weights, 17, source_lang=None, target_lang=None)
    (tmp_path / name).write_bytes(file)
    ours = checkpoint(name, tmp_path)
    assert equal({key: value for key, value in ours["model"].items() if "_float_tensor" not in key}, theirs["model"])
    written = vars(ours["args"]) | {"lr": settings["lr"]}
    assert written == {key: settings.get(key) for key in written}


@pytest.mark.parametrize("share", ["all", "decoder", "none"])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_what_is_written_is_read_bit_by_bit(share, pre_norm):
    arch = replace(ARCH, share_embeddings=share, pre_norm=pre_norm, attention_dropout=0.1, activation_dropout=0.05)
    words = (11, 11) if share == "all" else (11, 13)
    model = Transformer(arch, *words)
    file = fairseq.write_checkpoint(model, model.state_dict(), 17, source_lang="en", target_lang="de")
    settings, weights = fairseq.read_checkpoint(file, NAME)
    assert fairseq.architecture(settings, weights, NAME) == arch
    assert (settings["source_lang"], settings["target_lang"]) == ("en", "de")
    other = load(file, words)
    assert equal(weights, model.state_dict()) and equal(other.state_dict(), weights)
    tied = other.decoder.output_projection.weight is other.decoder.embed_tokens.weight
    assert tied == (share != "none")


def old_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict as fairseq of 2018 wrote it, with entries that are no weights."""
    old = joined(weights)
    for stack, norms in (("encoder", ("self_attn", "final")), ("decoder", ("self_attn", "encoder_attn", "final"))):
        for number, norm in enumerate(norms):
            todays = re.compile(rf"^({stack}\..*){norm}_layer_norm")
            old = {todays.sub(rf"\1layer_norms.{number}", name): value for name, value in old.items()}
        old |= {f"{stack}.version": torch.ones(1), f"{stack}.embed_positions.weights": torch.zeros(1026, 32)}
    projection = old.pop("decoder.output_projection.weight")
    shared = torch.equal(projection, old["decoder.embed_tokens.weight"])
    return old if shared else old | {"decoder.embed_out": projection}


@pytest.mark.parametrize(("name", "legacy"), [("trained.pt", False), ("prenorm.pt", True)])
def test_older_names_files_and_half_precision_become_todays(name, legacy):
    """legacy: as torch before 1.6 wrote it, not a zip."""
    settings, weights = read(name)
    half = {key: value.half() for key, value in weights.items()}
    old = old_names(half)
    assert {"encoder.layers.0.layer_norms.1.bias", "decoder.layers.1.encoder_attn.in_proj_bias"} <= old.keys()
    assert ("decoder.embed_out" in old) == (name == "prenorm.pt")
    state = {"args": argparse.Namespace(**settings), "model": old}
    found = fairseq.read_checkpoint(content(state, _use_new_zipfile_serialization=not legacy), NAME)
    assert found[0] == settings and equal(found[1], {key: value.float() for key, value in half.items()})
    assert {value.dtype for value in found[1].values()} == {torch.float32}


def test_settings_that_a_file_leaves_out_are_fairseqs_defaults():
    assert fairseq.architecture({}, {}, NAME) == Architecture(share_embeddings="none")
    settings = {"encoder_embed_dim": 1024, "encoder_ffn_embed_dim": 4096, "relu_dropout": 0.1, "dropout": 0.3}
    settings |= {"max_source_positions": 256, "share_decoder_input_output_embed": True}
    expected = Architecture(dim=1024, ffn_dim=4096, dropout=0.3, activation_dropout=0.1, max_positions=256)
    assert fairseq.architecture(settings, {}, NAME) == replace(expected, share_embeddings="decoder")


WEIGHTS = {"a": torch.zeros(2)}
NOT_CHECKPOINTS = {  # content, and what is said of it
    "empty": (b"", ""),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", ""),
    "pickle": (pickle.dumps({"model": {}, "args": None}), ""),
    "safetensors": (save_safetensors(WEIGHTS), ""),
    "cut": ((GOLDEN / "initial.pt").read_bytes()[:-1], ""),
    "module": (content({"model": nn.Linear(2, 2), "args": argparse.Namespace()}), r"holds a torch\.nn\..*\.Linear"),
    "list": (content([1, 2]), 'it has no "model"'),
    "weights": (content(WEIGHTS), 'it has no "model"'),
    "no settings": (content({"model": WEIGHTS, "args": None, "cfg": None}), 'neither "args" nor "cfg"'),
    "settings of no model": (content({"model": WEIGHTS, "cfg": {"task": {}}}), 'neither "args" nor "cfg"'),
}


@pytest.mark.parametrize(("file", "message"), NOT_CHECKPOINTS.values(), ids=NOT_CHECKPOINTS)
def test_other_kinds_of_files_and_damaged_ones_are_refused_in_one_sentence(file, message):
    with refused(message), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what the bytes could mean
        fairseq.read_checkpoint(file, NAME)


class Planted:
    """Writes the file "ran" when it is unpickled."""

    def __reduce__(self):
        return open, ("ran", "w")


def test_a_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planted, marker = content({**checkpoint("initial.pt"), "extra_state": Planted()}), tmp_path / "ran"
    with refused(r"holds a (\w+\.)?open"):
        fairseq.read_checkpoint(planted, NAME)
    assert not marker.exists()
    torch.load(io.BytesIO(planted), weights_only=False)
    assert marker.exists(), "the trap is one"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({switch: True}, f"{switch} True; .* False only") for switch in SWITCHES),
        ({"activation_fn": "gelu"}, "activation_fn gelu; .* relu only"),
        ({"adaptive_softmax_cutoff": [1000, 2000]}, "adaptive_softmax_cutoff"),
        ({"quant_noise_pq": 0.1}, "quant_noise_pq"),
        ({"decoder_embed_dim": 16}, "embed_dim 32 in its encoder and 16 in its decoder"),
        ({"decoder_attention_heads": 2}, "attention_heads 4 in its encoder and 2"),
        ({"decoder_normalize_before": True}, "normalize_before False in its encoder and True"),
        ({"encoder_normalize_before": True, "decoder_normalize_before": True}, "not after the last"),
    ],
)
def test_models_that_are_not_this_transformer_are_refused(settings, message):
    loaded, weights = read("initial.pt")
    with refused(message):
        fairseq.architecture(loaded | settings, weights, NAME)


def test_another_dictionary_is_named():
    for name, words, message in (
        ("initial.pt", (65, 65), r"encoder\.embed_tokens\.weight has 64 words .* dictionary 65"),
        ("prenorm.pt", (23, 40), r"encoder\.embed_tokens\.weight has 24 words"),
        ("prenorm.pt", (24, 41), r"decoder\.embed_tokens\.weight has 40 words"),
    ):
        with refused(f"another dictionary: {message}"):
            load((GOLDEN / name).read_bytes(), words)


@pytest.mark.parametrize(
    "change", [{"encoder_layers": 3}, {"decoder_layers": 1}, {"ffn_dim": 128}, {"dim": 64}, {"pre_norm": True}]
)
def test_weights_of_another_architecture_are_refused(change):
    settings, weights = read("initial.pt")
    arch = replace(fairseq.architecture(settings, weights, NAME), **change)
    model = Transformer(arch, 64, 64)
    before = copy.deepcopy(model.state_dict())
    with refused(r"does not fit the model: \S+ and \d+ more tensors differ"):
        fairseq.load_weights(model, weights, NAME)
    assert equal(model.state_dict(), before), "nothing was loaded"
