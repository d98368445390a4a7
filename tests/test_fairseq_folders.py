"""models/fairseq_folders.py on what fairseq wrote and computed (tests/fairseq_reference), both ways; on older files and
on what is none. Live, where there is .venv-fairseq: fairseq loads what we write, and finds our ids and logits."""

import argparse
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import equal
from model_helpers import GOLDEN, arrays, golden, joined, live, with_fairseq
from torch import Tensor
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaTokenizer

from data import vocabulary
from data.fairseq_format import Dictionary
from errors import InputError
from models import classification, fairseq_folders
from models.encoder_files import Source

PAD, MASK = 1, "<mask>"
WORDS = "roberta.embeddings.word_embeddings.weight"

pytestmark = pytest.mark.filterwarnings("ignore:.*classification heads")


def release(folder: Path) -> Path:
    """The golden model with GPT-2's BPE in the layout of the released models."""
    shutil.copytree(GOLDEN / "roberta_bpe", folder)
    shutil.copy(GOLDEN / "roberta_bpe.pt", folder / "model.pt")
    return folder


def build(config: RobertaConfig, state_dict: dict[str, Tensor]) -> RobertaForMaskedLM:
    model = RobertaForMaskedLM(config).eval()
    model.load_state_dict(state_dict)  # strict: neither more nor less
    return model


@torch.no_grad()
def logits(model: RobertaForMaskedLM, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens.long(), attention_mask=(tokens != PAD).long()).logits


def random_model(words: int = 30, **settings) -> RobertaForMaskedLM:
    """A transformers model whose norms, biases and token types are not 1 and 0."""
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    sizes |= {"vocab_size": words, "max_position_embeddings": 42, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    torch.manual_seed(0)
    model = RobertaForMaskedLM(RobertaConfig(**sizes | {"tie_word_embeddings": True} | settings)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def learnt() -> RobertaTokenizer:
    """A tokenizer of transformers, with 322 ids in another order than fairseq's dictionaries would have them."""
    return vocabulary.learn((GOLDEN / "text/train.en").read_text(encoding="utf-8").splitlines(), "roberta", 322)


def test_logits_are_fairseqs_for_a_tied_model_of_words():
    settings, weights = golden("roberta.pt")
    config, state_dict = fairseq_folders.to_transformers(weights, settings)
    assert (config.vocab_size, config.max_position_embeddings, config.type_vocab_size) == (41, 66, 1)
    assert (config.layer_norm_eps, config.hidden_dropout_prob, config.classifier_dropout) == (1e-5, 0.1, 0.0)
    assert config.tie_word_embeddings and state_dict["lm_head.decoder.weight"] is state_dict[WORDS]
    data = arrays()
    tokens = torch.from_numpy(data["roberta.tokens"])
    real = (tokens != PAD).numpy()
    assert not real.all()
    found = logits(build(config, state_dict), tokens).numpy()
    np.testing.assert_allclose(found[real], data["roberta.all_logits"][real], atol=2e-5, rtol=1e-5)


def test_a_released_folder_gives_fairseqs_ids_and_logits(tmp_path):
    with pytest.warns(UserWarning, match=r"model\.pt has classification heads, which are left out: three"):
        config, state_dict, tokenizer = fairseq_folders.read_folder(release(tmp_path / "roberta.tiny"))
    assert not config.tie_word_embeddings and config.classifier_dropout == 0.2
    assert not torch.equal(state_dict["lm_head.decoder.weight"], state_dict[WORDS])
    assert len(tokenizer) == config.vocab_size == 329 and tokenizer.mask_token_id == 328
    assert tokenizer.model_max_length == 62 == config.max_position_embeddings - 2
    data = arrays("roberta_bpe.npz")
    pairs = [(one, two or None) for one, two in zip(data["sentences"].tolist(), data["seconds"].tolist(), strict=True)]
    for (first, second), row, text in zip(pairs, data["tokens"], data["decoded"].tolist(), strict=True):
        ids = tokenizer(first, second)["input_ids"]
        assert ids == row[row != PAD].tolist()
        assert tokenizer.decode(tokenizer(first)["input_ids"], skip_special_tokens=True) == text == first
    assert tokenizer("a <mask>")["input_ids"][2:] == [tokenizer.mask_token_id, 2], "the mask takes the space"
    batch = tokenizer([pair[0] for pair in pairs[:5]], padding=True)
    np.testing.assert_array_equal(batch["input_ids"], data["tokens"][:5])
    tokens = torch.from_numpy(data["tokens"][:2])
    tokens[[0, 1], data["masked"][:2]] = tokenizer.mask_token_id
    found = logits(build(config, state_dict), tokens)[tokens != PAD].numpy()
    np.testing.assert_allclose(found, data["logits"], atol=2e-5, rtol=1e-5)


def test_a_classifier_says_which_heads_of_fairseq_are_left_out(tmp_path):
    config, state_dict, _ = fairseq_folders.read_folder(release(tmp_path / "roberta.tiny"))
    found = classification.classifier(config, ("a", "b", "c"), Source(str(tmp_path), state_dict))
    assert found.head.rows is None and "without training" in found.head.untrained
    assert "the head is new" in found.head.said and "heads of fairseq, which are left out: three" in found.head.said
    words = "roberta.embeddings.word_embeddings.weight"
    assert torch.equal(found.model.state_dict()[words], state_dict[words])


def test_a_folder_survives_the_way_to_transformers_and_back(tmp_path):
    folders = tmp_path / "ours", release(tmp_path / "theirs")
    fairseq_folders.write_folder(folders[0], *fairseq_folders.read_folder(folders[1]))
    for name, read in {"encoder.json": json.loads, "vocab.bpe": bytes}.items():
        assert read((folders[0] / name).read_bytes()) == read((folders[1] / name).read_bytes()), name
    assert Dictionary.load(folders[0] / "dict.txt") == Dictionary.load(folders[1] / "dict.txt")
    (ours, written), (settings, theirs) = (golden(str(folder / "model.pt")) for folder in folders)
    assert equal(written, {key: value for key, value in theirs.items() if "classification_heads." not in key})
    for key, value in ours.items():
        if key.startswith("encoder_") or key.endswith("dropout") or key in ("max_positions", "activation_fn"):
            assert settings[key] == value, key


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_transformers_survives_the_way_to_fairseq_and_back(tmp_path, tied):
    tokenizer = learnt()
    # Padded to a multiple of 16: <mask> is not the last id any more.
    model = random_model(336, tie_word_embeddings=tied, type_vocab_size=2)
    weights = model.state_dict()
    if tied:  # as in a file of safetensors, which holds them once
        del weights["lm_head.decoder.weight"], weights["lm_head.decoder.bias"]
    fairseq_folders.write_folder(tmp_path / "model", model.config, weights, tokenizer)
    config, state_dict, again = fairseq_folders.read_folder(tmp_path / "model")
    assert config.tie_word_embeddings == tied and config.classifier_dropout == 0.1
    text = [*arrays("roberta_bpe.npz")["sentences"].tolist(), "a <mask> sees"]
    batch = tokenizer(text, padding=True, return_tensors="pt")["input_ids"]
    assert torch.equal(again(text, padding=True, return_tensors="pt")["input_ids"], batch)
    real = batch != PAD
    expected, found = logits(model, batch)[real], logits(build(config, state_dict), batch)[real]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert model.roberta.embeddings.token_type_embeddings.weight[0].abs().max() > 0.1, "there was something to fold"


def older(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names that older versions of fairseq gave, those of several versions at once."""
    names = {"layernorm_embedding": "emb_layer_norm", "self_attn_layer_norm": "layer_norms.0"}
    names |= {"final_layer_norm": "layer_norms.1", r"^encoder\.": "decoder."}
    named = joined(weights)
    for new, old in names.items():
        named = {re.sub(new, old, key): value for key, value in named.items()}
    return named


def test_older_names_are_todays():
    settings, weights = golden("roberta.pt")
    assert not older(weights).keys() & weights.keys()
    config, expected = fairseq_folders.to_transformers(weights, settings)
    upgraded, found = fairseq_folders.to_transformers(older(weights), argparse.Namespace(**settings))
    assert upgraded.to_dict() == config.to_dict() and equal(found, expected)


def test_what_settings_leave_out_is_fairseqs_default():
    config = fairseq_folders._configuration({"tokens_per_sample": 20}, 5)
    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == (768, 12, 3072)
    assert (config.num_hidden_layers, config.max_position_embeddings) == (12, 22)
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.1, 0.1)


def test_a_data2vec_checkpoint_gets_a_new_head():
    settings, weights = golden("roberta.pt")
    bare = {key: value for key, value in weights.items() if "lm_head" not in key}
    with pytest.raises(InputError, match=r"does not fit its settings: lm_head\.bias and 6 more tensors differ"):
        fairseq_folders.to_transformers(bare, settings)
    bare |= {"encoder._ema": torch.zeros(1), "encoder.regression_head.0.weight": torch.zeros(2, 2)}
    with pytest.warns(UserWarning, match="no head for masked tokens"):
        config, state_dict = fairseq_folders.to_transformers(bare, settings)
    dense = state_dict["lm_head.dense.weight"]
    assert 0.01 < dense.std() < 0.03 and torch.equal(state_dict["lm_head.layer_norm.weight"], torch.ones(32))
    build(config, state_dict)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_fn": "relu"}, "has activation_fn relu; transformers' RoBERTa has gelu only"),
        ({"encoder_normalize_before": True}, "has encoder_normalize_before True; .* False only"),
        ({"activation_dropout": 0.1}, "has activation_dropout 0.1; .* 0 only"),
        ({"quant_noise_pq": 0.1}, "has quant_noise_pq 0.1; .* 0 only"),
        ({"max_positions": 60}, r"does not fit .*: roberta\.embeddings\.position_embeddings\.weight and 0 more"),
        ({"encoder_layers": 1}, r"does not fit .*: encoder\.sentence_encoder\.layers\.1\.fc1\.bias and 15 more"),
        ({"encoder_layers": 3}, r"does not fit .*: roberta\.encoder\.layer\.2\.\S+\.bias and 15 more tensors differ"),
    ],
)
def test_another_kind_of_roberta_and_weights_that_disagree_with_the_settings_are_refused(change, message):
    settings, weights = golden("roberta.pt")
    with pytest.raises(InputError, match=rf"^a\.pt .*{message}"):
        fairseq_folders.to_transformers(weights, settings | change, "a.pt")


def test_another_model_and_tied_weights_that_differ_are_refused():
    settings, weights = golden("roberta.pt")
    weights["encoder.lm_head.weight"] = weights["encoder.lm_head.weight"] + 1
    with pytest.raises(InputError, match=r"they tie encoder\.lm_head\.weight to .*embed_tokens\.weight"):
        fairseq_folders.to_transformers(weights, settings)
    settings, weights = golden("trained.pt")
    with pytest.raises(InputError, match="holds fairseq's transformer; expected a RoBERTa, with a tensor"):
        fairseq_folders.to_transformers(weights, settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_norm_eps": 1e-12}, r"layer_norm_eps is 1e-12; fairseq's RoBERTa has 1e-05 only"),
        ({"hidden_act": "relu"}, r"hidden_act is 'relu'; fairseq's RoBERTa has 'gelu' only"),
        ({"pad_token_id": 0}, r"pad_token_id is 0"),
        ({"num_hidden_layers": 1}, r"not a RobertaForMaskedLM of its config: roberta\.encoder\.layer\.1\..* 15"),
        ({"num_hidden_layers": 3}, r"not a RobertaForMaskedLM of its config: roberta\.encoder\.layer\.2\..* 15"),
        ({"tie_word_embeddings": True}, r"ties roberta\.\S+\.word_embeddings\.weight and lm_head\.decoder\.weight"),
    ],
)
def test_a_model_that_fairseq_cannot_be_and_a_state_dict_of_another_are_refused(change, message):
    untied = {"tie_word_embeddings": False}
    with pytest.raises(InputError, match=message):
        fairseq_folders.from_transformers(random_model(**untied | change).config, random_model(**untied).state_dict())


# File, what is replaced in it (None: the file goes), by what, the message.
BREAKAGES = [
    ("model.pt", None, "", r"has no model\.pt; expected a RoBERTa of fairseq$"),
    ("vocab.bpe", None, "", r"has no vocab\.bpe; expected a RoBERTa of fairseq; https://\S+ has encoder\.json and"),
    ("dict.txt", r"\Z", "madeupword7 0\n", r"dict\.txt does not fit .*model\.pt: .* it has 330, and the model 329"),
    ("dict.txt", r"\A.*\n", "", r"dict\.txt lacks 1 of the 317 tokens of encoder\.json, 78 among them"),
    ("dict.txt", "madeupword0006", "hello", r"dict\.txt line 324 has 'hello'; expected a number that encoder\.json"),
    ("dict.txt", "madeupword0006", "madeupword0000", r"dict\.txt line 324 has 'madeupword0000', .* there already"),
    ("dict.txt", r"\A.*", "17", r"dict\.txt line 1 is '17'; expected a symbol, a space and its count"),
    ("dict.txt", r"\A", "\udcff 3\n", r"dict\.txt is not UTF-8 \(byte 0\); expected fairseq's dictionary"),
    ("encoder.json", "(?s).*", "{", r"encoder\.json is not JSON \(.*\); expected GPT-2's encoder\.json"),
    ("encoder.json", "(?s).*", "[1]", r"does not map tokens to numbers"),
    ("encoder.json", "(?s).*", '{"a": 1}', r"encoder\.json has no token for 255 of the 256 bytes, '!' among them"),
    ("vocab.bpe", "\n.*", "\nq z", r"vocab\.bpe line 2 is 'q z'; expected two tokens whose union encoder\.json has"),
    ("vocab.bpe", "\n.*", "\nt", r"vocab\.bpe line 2 is 't'; expected two tokens"),
]


@pytest.mark.parametrize(("name", "old", "new", "message"), BREAKAGES)
def test_a_broken_folder_is_named(tmp_path, name, old, new, message):
    folder = release(tmp_path / "model")
    path = folder / name
    if old is None:
        path.unlink()
    else:
        content = re.sub(old, new, path.read_text(encoding="utf-8"), count=1)
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=message) as raised:
        fairseq_folders.read_folder(folder)
    assert str(folder) in str(raised.value)


def test_a_tokenizer_that_fairseq_cannot_be_is_refused(tmp_path):
    tokenizer, model = learnt(), random_model(322)
    words = tokenizer.get_vocab()

    def refused(tokenizer, message: str, model: RobertaForMaskedLM = model) -> None:
        with pytest.raises(InputError, match=message):
            fairseq_folders.write_folder(tmp_path / "out", model.config, model.state_dict(), tokenizer)
        assert not (tmp_path / "out").exists(), "nothing is written by halves"

    refused(RobertaTokenizer(vocab=words, merges=[], add_prefix_space=True), r"byte-level BPE without add_prefix_space")
    refused(tokenizer, "has 322 tokens and the model 300; expected those of one", random_model(300))
    shifted = {token: (place + 1) % 322 for token, place in words.items()}
    refused(RobertaTokenizer(vocab=shifted, merges=[]), "begins with <mask> <s> <pad> </s>; fairseq needs <s> <pad>")
    fairseq_folders.write_folder(tmp_path / "out", model.config, model.state_dict(), tokenizer)
    assert MASK not in (tmp_path / "out/dict.txt").read_text(), "fairseq's task appends it"
    shutil.rmtree(tmp_path / "out")
    tokenizer.add_tokens(["zebra"])
    refused(tokenizer, r"has 1 added tokens, 'zebra' among them")


HUB = """
import sys
import numpy as np
import torch
from fairseq.data.data_utils import collate_tokens
from fairseq.models.roberta import RobertaModel
folder, arrays, out = sys.argv[1:]
files = {"gpt2_encoder_json": f"{folder}/encoder.json", "gpt2_vocab_bpe": f"{folder}/vocab.bpe"}
hub = RobertaModel.from_pretrained(folder, **files).eval()
with np.load(arrays) as file:
    sentences, tokens = file["sentences"].tolist(), torch.from_numpy(file["tokens"]).long()
ids = collate_tokens([hub.encode(sentence) for sentence in sentences], hub.task.source_dictionary.pad())
found = {"ids": ids.numpy(), "mask": hub.task.mask_idx}
with torch.no_grad():
    found["logits"] = hub.model(tokens)[0].numpy()
np.savez(out, **found)
"""


@live
@pytest.mark.parametrize(("tied", "words"), [(True, 322), (False, 336)])
def test_fairseq_loads_what_we_write_and_has_our_ids_and_logits(tmp_path, tied, words):
    tokenizer = learnt()
    model = random_model(words, tie_word_embeddings=tied, type_vocab_size=2)
    folder = tmp_path / "model"
    fairseq_folders.write_folder(folder, model.config, model.state_dict(), tokenizer)
    text = arrays("roberta_bpe.npz")["sentences"].tolist()
    tokens = tokenizer(text, padding=True, return_tensors="pt")["input_ids"]
    hidden = tokens.clone()
    hidden[:, 1] = tokenizer.mask_token_id
    np.savez(tmp_path / "in.npz", sentences=np.array(text), tokens=hidden.numpy())
    with_fairseq("-c", HUB, folder, tmp_path / "in.npz", tmp_path / "out.npz")
    found = arrays("out.npz", tmp_path)
    np.testing.assert_array_equal(found["ids"], tokens)
    assert found["mask"] == tokenizer.mask_token_id == 321
    real = hidden != PAD
    for ours in (model, build(*fairseq_folders.read_folder(folder)[:2])):
        np.testing.assert_allclose(found["logits"][real], logits(ours, hidden)[real], rtol=1e-5, atol=1e-5)
