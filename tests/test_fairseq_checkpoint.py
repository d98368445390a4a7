"""models/fairseq.py on files that fairseq wrote (the golden ones), on our own, on older ones, and on what is none."""

import argparse
import copy
import io
import pickle
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
from models.transformer import EOS, Architecture, Transformer

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


def logits(model: Transformer) -> Tensor:
    source, previous = torch.tensor([[5, 6, 7, EOS], [8, 9, EOS, 1]]), torch.tensor([[EOS, 4, 9], [EOS, 7, 1]])
    return model(source, previous).detach()


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("initial.pt", Architecture(32, 64, 4, 2, 2, dropout=0.0)),
        ("trained.pt", Architecture(32, 64, 4, 2, 2, dropout=0.1)),
        ("prenorm.pt", Architecture(32, 64, 4, 2, 2, dropout=0.1, pre_norm=True, share_embeddings="none")),
    ],
)
def test_fairseqs_files_are_read_with_their_settings(name, arch):
    settings, weights = read(name)
    assert fairseq.architecture(settings, weights, NAME) == arch
    written = checkpoint(name)["model"].items()
    assert equal(weights, {key: value for key, value in written if not key.endswith(".version")})
    model = Transformer(arch, *WORDS[name])
    fairseq.load_weights(model, weights, NAME)
    assert equal(model.state_dict(), weights)


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
    assert torch.equal(logits(other), logits(model.eval()))
    tied = other.decoder.output_projection.weight is other.decoder.embed_tokens.weight
    assert tied == (share != "none")


def old_names(weights: dict[str, Tensor], shared: bool) -> dict[str, Tensor]:
    """A state_dict as fairseq of 2018 wrote it."""
    old: dict[str, Tensor] = {}
    for name, value in joined(weights).items():
        norms = ["self_attn_layer_norm", *["encoder_attn_layer_norm"] * name.startswith("decoder."), "final_layer_norm"]
        for number, norm in enumerate(norms):
            name = name.replace(norm, f"layer_norms.{number}")
        if "output_projection" not in name:
            old[name] = value
        elif not shared:
            old["decoder.embed_out"] = value
    for stack, version in (("encoder", 2.0), ("decoder", 3.0)):
        old[f"{stack}.version"] = torch.tensor([version])
        old[f"{stack}.embed_positions.weights"] = torch.zeros(1026, 32)
        old[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
    return old


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("name", ["trained.pt", "prenorm.pt"])
def test_older_names_give_the_same_logits(name, legacy):
    state = checkpoint(name)
    shared = name == "trained.pt"
    weights = {key: value for key, value in state["model"].items() if not key.endswith(".version")}
    old = old_names(weights, shared)
    assert {"encoder.layers.0.layer_norms.1.bias", "decoder.layers.1.encoder_attn.in_proj_bias"} <= old.keys()
    assert ("decoder.embed_out" in old) != shared
    settings = {key: value for key, value in vars(state["cfg"]["model"]).items() if key != "activation_fn"}
    settings["relu_dropout"] = settings.pop("activation_dropout")
    file = content({"args": argparse.Namespace(**settings), "model": old}, _use_new_zipfile_serialization=not legacy)
    expected = load((GOLDEN / name).read_bytes(), WORDS[name])
    assert torch.equal(logits(load(file, WORDS[name])), logits(expected))


def test_settings_that_a_file_leaves_out_are_fairseqs_defaults():
    assert fairseq.architecture({}, {}, NAME) == Architecture(share_embeddings="none")
    settings = {"encoder_embed_dim": 1024, "encoder_ffn_embed_dim": 4096, "relu_dropout": 0.1, "dropout": 0.3}
    settings |= {"max_source_positions": 256, "share_decoder_input_output_embed": True}
    expected = Architecture(dim=1024, ffn_dim=4096, dropout=0.3, activation_dropout=0.1, max_positions=256)
    assert fairseq.architecture(settings, {}, NAME) == replace(expected, share_embeddings="decoder")


def test_half_precision_weights_become_float32():
    state = checkpoint("trained.pt")
    state["model"] = {key: value.half() for key, value in state["model"].items()}
    _, weights = fairseq.read_checkpoint(content(state), NAME)
    torch.testing.assert_close(weights, {key: state["model"][key].float() for key in weights}, rtol=0, atol=0)


A = {"a": torch.zeros(2)}
NOT_CHECKPOINTS = {  # content, and what is said of it
    "empty": (b"", ""),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", ""),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), ""),
    "pickle": (pickle.dumps({"model": {}, "args": None}), ""),
    "safetensors": (save_safetensors({"encoder.embed_tokens.weight": torch.zeros(4, 4)}), ""),
    "half": ((GOLDEN / "initial.pt").read_bytes()[:60_000], ""),
    "cut": ((GOLDEN / "initial.pt").read_bytes()[:-1], ""),
    "module": (content({"model": nn.Linear(2, 2), "args": argparse.Namespace()}), r"holds a torch\.nn\..*\.Linear"),
    "list": (content([1, 2]), 'it has no "model"'),
    "weights": (content({"encoder.embed_tokens.weight": torch.zeros(2, 2)}), 'it has no "model"'),
    "no settings": (content({"model": A}), 'neither "args" nor "cfg"'),
    "empty settings": (content({"model": A, "args": None, "cfg": None}), 'neither "args" nor "cfg"'),
    "settings of no model": (content({"model": A, "args": None, "cfg": {"task": {}}}), 'neither "args" nor "cfg"'),
}


@pytest.mark.parametrize("kind", NOT_CHECKPOINTS)
def test_other_kinds_of_files_and_damaged_ones_are_refused_in_one_sentence(kind):
    file, message = NOT_CHECKPOINTS[kind]
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
        ({"decoder_ffn_embed_dim": 16}, "ffn_embed_dim 64 in its encoder and 16"),
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
