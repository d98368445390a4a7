"""models/fairseq_folders.py on what fairseq wrote and computed (tests/fairseq_reference), both
ways; on older files and on what is none.

Live, where there is .venv-fairseq: fairseq loads what we write, and finds our ids and logits.
"""

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

PAD = 1
MASK = "<mask>"
WORD_EMBEDDINGS = "roberta.embeddings.word_embeddings.weight"
LEARNT_WORDS = 322  # of `learnt_tokenizer`

pytestmark = pytest.mark.filterwarnings("ignore:.*classification heads")


def release(folder: Path) -> Path:
    """Writes the golden model with GPT-2's BPE in the layout of the released models; returns the
    folder."""
    shutil.copytree(GOLDEN / "roberta_bpe", folder)
    shutil.copy(GOLDEN / "roberta_bpe.pt", folder / "model.pt")
    return folder


def build(config: RobertaConfig, state_dict: dict[str, Tensor]) -> RobertaForMaskedLM:
    model = RobertaForMaskedLM(config).eval()
    model.load_state_dict(state_dict)  # strict: neither more nor less
    return model


@torch.no_grad()
def logits(model: RobertaForMaskedLM, tokens: Tensor) -> Tensor:
    """Returns logits [B, T, words] of tokens [B, T], among which padding is not seen."""
    is_real = (tokens != PAD).long()
    return model(input_ids=tokens.long(), attention_mask=is_real).logits


def random_model(words: int = 30, **settings) -> RobertaForMaskedLM:
    """Returns a model of transformers whose norms, biases and token types are not 1 and 0."""
    defaults = {
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "vocab_size": words,
        "max_position_embeddings": 42,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    model = RobertaForMaskedLM(RobertaConfig(**defaults | settings)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def learnt_tokenizer() -> RobertaTokenizer:
    """Returns a tokenizer of transformers, with 322 ids in another order than fairseq's
    dictionaries would have them."""
    lines = (GOLDEN / "text/train.en").read_text(encoding="utf-8").splitlines()
    return vocabulary.learn(lines, "roberta", LEARNT_WORDS)


# ---- from fairseq ------------------------------------------------------------------------------
def test_logits_are_fairseqs_for_a_tied_model_of_words():
    settings, weights = golden("roberta.pt")

    config, state_dict = fairseq_folders.to_transformers(weights, settings)

    assert config.vocab_size == 41
    assert config.max_position_embeddings == 66
    assert config.type_vocab_size == 1
    assert config.layer_norm_eps == 1e-5
    assert config.hidden_dropout_prob == 0.1
    assert config.classifier_dropout == 0.0
    assert config.tie_word_embeddings
    assert state_dict["lm_head.decoder.weight"] is state_dict[WORD_EMBEDDINGS]

    recorded = arrays()
    tokens = torch.from_numpy(recorded["roberta.tokens"])
    is_real = (tokens != PAD).numpy()
    assert not is_real.all()
    found = logits(build(config, state_dict), tokens).numpy()
    expected = recorded["roberta.all_logits"]
    np.testing.assert_allclose(found[is_real], expected[is_real], atol=2e-5, rtol=1e-5)


def test_a_released_folder_has_an_untied_model(tmp_path):
    folder = release(tmp_path / "roberta.tiny")

    message = r"model\.pt has classification heads, which are left out: three"
    with pytest.warns(UserWarning, match=message):
        config, state_dict, tokenizer = fairseq_folders.read_folder(folder)

    assert not config.tie_word_embeddings
    assert config.classifier_dropout == 0.2
    assert not torch.equal(state_dict["lm_head.decoder.weight"], state_dict[WORD_EMBEDDINGS])
    assert config.vocab_size == 329
    assert len(tokenizer) == 329
    assert tokenizer.mask_token_id == 328
    assert config.max_position_embeddings == 64
    assert tokenizer.model_max_length == 62


def test_a_released_folder_gives_fairseqs_ids(tmp_path):
    _, _, tokenizer = fairseq_folders.read_folder(release(tmp_path / "roberta.tiny"))
    recorded = arrays("roberta_bpe.npz")
    sentences = recorded["sentences"].tolist()
    seconds = recorded["seconds"].tolist()
    decoded = recorded["decoded"].tolist()

    cases = zip(sentences, seconds, recorded["tokens"], decoded, strict=True)
    for first, second, row, text in cases:
        ids = tokenizer(first, second or None)["input_ids"]
        assert ids == row[row != PAD].tolist()
        first_ids = tokenizer(first)["input_ids"]
        assert tokenizer.decode(first_ids, skip_special_tokens=True) == text
        assert text == first

    with_mask = tokenizer("a <mask>")["input_ids"]
    assert with_mask[2:] == [tokenizer.mask_token_id, 2], "the mask takes the space"
    batch = tokenizer(sentences[:5], padding=True)
    np.testing.assert_array_equal(batch["input_ids"], recorded["tokens"][:5])


def test_a_released_folder_gives_fairseqs_logits(tmp_path):
    folder = release(tmp_path / "roberta.tiny")
    config, state_dict, tokenizer = fairseq_folders.read_folder(folder)
    recorded = arrays("roberta_bpe.npz")
    tokens = torch.from_numpy(recorded["tokens"][:2])
    tokens[[0, 1], recorded["masked"][:2]] = tokenizer.mask_token_id

    found = logits(build(config, state_dict), tokens)

    real = found[tokens != PAD].numpy()
    np.testing.assert_allclose(real, recorded["logits"], atol=2e-5, rtol=1e-5)


def test_a_classifier_says_which_heads_of_fairseq_are_left_out(tmp_path):
    config, state_dict, _ = fairseq_folders.read_folder(release(tmp_path / "roberta.tiny"))
    source = Source(str(tmp_path), state_dict)

    found = classification.classifier(config, ("a", "b", "c"), source)

    assert found.head.rows is None
    assert "without training" in found.head.refusal_at_lr_0
    assert "the head is new" in found.head.message
    assert "heads of fairseq, which are left out: three" in found.head.message
    embeddings = found.model.state_dict()[WORD_EMBEDDINGS]
    assert torch.equal(embeddings, state_dict[WORD_EMBEDDINGS])


def older(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights by the names that older versions of fairseq gave, those of several versions
    at once."""
    old_names = {
        "layernorm_embedding": "emb_layer_norm",
        "self_attn_layer_norm": "layer_norms.0",
        "final_layer_norm": "layer_norms.1",
        r"^encoder\.": "decoder.",
    }
    renamed = joined(weights)
    for new, old in old_names.items():
        renamed = {re.sub(new, old, key): value for key, value in renamed.items()}
    return renamed


def test_older_names_are_todays():
    settings, weights = golden("roberta.pt")
    old = older(weights)
    assert not old.keys() & weights.keys()

    expected_config, expected = fairseq_folders.to_transformers(weights, settings)
    config, found = fairseq_folders.to_transformers(old, argparse.Namespace(**settings))

    assert config.to_dict() == expected_config.to_dict()
    assert equal(found, expected)


def test_what_settings_leave_out_is_fairseqs_default():
    config = fairseq_folders._configuration({"tokens_per_sample": 20}, 5)

    assert config.hidden_size == 768
    assert config.num_attention_heads == 12
    assert config.intermediate_size == 3072
    assert config.num_hidden_layers == 12
    assert config.max_position_embeddings == 22
    assert config.hidden_dropout_prob == 0.1
    assert config.attention_probs_dropout_prob == 0.1


def test_a_data2vec_checkpoint_gets_a_new_head():
    settings, weights = golden("roberta.pt")
    bare = {key: value for key, value in weights.items() if "lm_head" not in key}
    message = r"does not fit its settings: lm_head\.bias and 6 more tensors differ"
    with pytest.raises(InputError, match=message):
        fairseq_folders.to_transformers(bare, settings)

    bare["encoder._ema"] = torch.zeros(1)
    bare["encoder.regression_head.0.weight"] = torch.zeros(2, 2)
    with pytest.warns(UserWarning, match="no head for masked tokens"):
        config, state_dict = fairseq_folders.to_transformers(bare, settings)

    assert 0.01 < state_dict["lm_head.dense.weight"].std() < 0.03
    assert torch.equal(state_dict["lm_head.layer_norm.weight"], torch.ones(32))
    build(config, state_dict)


# ---- there and back ----------------------------------------------------------------------------
def test_a_folder_survives_transformers_and_back(tmp_path):
    theirs = release(tmp_path / "theirs")
    ours = tmp_path / "ours"

    config, state_dict, tokenizer = fairseq_folders.read_folder(theirs)
    fairseq_folders.write_folder(ours, config, state_dict, tokenizer)

    encoder = json.loads((ours / "encoder.json").read_bytes())
    assert encoder == json.loads((theirs / "encoder.json").read_bytes())
    assert (ours / "vocab.bpe").read_bytes() == (theirs / "vocab.bpe").read_bytes()
    assert Dictionary.load(ours / "dict.txt") == Dictionary.load(theirs / "dict.txt")

    our_settings, our_weights = golden(str(ours / "model.pt"))
    their_settings, their_weights = golden(str(theirs / "model.pt"))
    expected = {}
    for key, value in their_weights.items():
        if "classification_heads." not in key:
            expected[key] = value
    assert equal(our_weights, expected)
    for key, value in our_settings.items():
        if key.startswith("encoder_") or key.endswith("dropout"):
            assert their_settings[key] == value, key
    for key in ("max_positions", "activation_fn"):
        assert their_settings[key] == our_settings[key], key


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_transformers_survives_fairseq_and_back(tmp_path, tied):
    tokenizer = learnt_tokenizer()
    # Padded to a multiple of 16: <mask> is not the last id any more.
    model = random_model(336, tie_word_embeddings=tied, type_vocab_size=2)
    weights = model.state_dict()
    if tied:  # as in a file of safetensors, which holds them once
        del weights["lm_head.decoder.weight"]
        del weights["lm_head.decoder.bias"]
    token_types = model.roberta.embeddings.token_type_embeddings.weight
    assert token_types[0].abs().max() > 0.1, "there is something to fold"

    fairseq_folders.write_folder(tmp_path / "model", model.config, weights, tokenizer)
    config, state_dict, again = fairseq_folders.read_folder(tmp_path / "model")

    assert config.tie_word_embeddings == tied
    assert config.classifier_dropout == 0.1
    text = [*arrays("roberta_bpe.npz")["sentences"].tolist(), "a <mask> sees"]
    tokens = tokenizer(text, padding=True, return_tensors="pt")["input_ids"]
    found_tokens = again(text, padding=True, return_tensors="pt")["input_ids"]
    assert torch.equal(found_tokens, tokens)
    is_real = tokens != PAD
    expected = logits(model, tokens)[is_real]
    found = logits(build(config, state_dict), tokens)[is_real]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ---- models that do not fit --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"activation_fn": "relu"},
            "has activation_fn relu; transformers' RoBERTa has gelu only",
        ),
        (
            {"encoder_normalize_before": True},
            "has encoder_normalize_before True; .* False only",
        ),
        ({"activation_dropout": 0.1}, "has activation_dropout 0.1; .* 0 only"),
        ({"quant_noise_pq": 0.1}, "has quant_noise_pq 0.1; .* 0 only"),
        (
            {"max_positions": 60},
            r"does not fit .*: roberta\.embeddings\.position_embeddings\.weight and 0 more",
        ),
        (
            {"encoder_layers": 1},
            r"does not fit .*: encoder\.sentence_encoder\.layers\.1\.fc1\.bias and 15 more",
        ),
        (
            {"encoder_layers": 3},
            r"does not fit .*: roberta\.encoder\.layer\.2\.\S+\.bias and 15 more tensors differ",
        ),
    ],
)
def test_other_kinds_of_roberta_and_wrong_settings_are_refused(change, message):
    settings, weights = golden("roberta.pt")

    with pytest.raises(InputError, match=rf"^a\.pt .*{message}"):
        fairseq_folders.to_transformers(weights, settings | change, "a.pt")


def test_tied_weights_that_differ_are_refused():
    settings, weights = golden("roberta.pt")
    weights["encoder.lm_head.weight"] = weights["encoder.lm_head.weight"] + 1

    message = r"they tie encoder\.lm_head\.weight to .*embed_tokens\.weight"
    with pytest.raises(InputError, match=message):
        fairseq_folders.to_transformers(weights, settings)


def test_a_transformer_is_no_roberta():
    settings, weights = golden("trained.pt")

    message = "holds fairseq's transformer; expected a RoBERTa, with a tensor"
    with pytest.raises(InputError, match=message):
        fairseq_folders.to_transformers(weights, settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_norm_eps": 1e-12},
            r"layer_norm_eps is 1e-12; fairseq's RoBERTa has 1e-05 only",
        ),
        (
            {"hidden_act": "relu"},
            r"hidden_act is 'relu'; fairseq's RoBERTa has 'gelu' only",
        ),
        ({"pad_token_id": 0}, r"pad_token_id is 0"),
        (
            {"num_hidden_layers": 1},
            r"not a RobertaForMaskedLM of its config: roberta\.encoder\.layer\.1\..* 15",
        ),
        (
            {"num_hidden_layers": 3},
            r"not a RobertaForMaskedLM of its config: roberta\.encoder\.layer\.2\..* 15",
        ),
        (
            {"tie_word_embeddings": True},
            r"ties roberta\.\S+\.word_embeddings\.weight and lm_head\.decoder\.weight",
        ),
    ],
)
def test_a_config_that_fairseq_cannot_have_is_refused(change, message):
    settings = {"tie_word_embeddings": False}
    weights = random_model(**settings).state_dict()
    other_config = random_model(**settings | change).config

    with pytest.raises(InputError, match=message):
        fairseq_folders.from_transformers(other_config, weights)


# ---- broken folders ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.pt", r"has no model\.pt; expected a RoBERTa of fairseq$"),
        (
            "vocab.bpe",
            r"has no vocab\.bpe; expected a RoBERTa of fairseq; https://\S+ has encoder\.json and",
        ),
    ],
)
def test_a_folder_without_a_file_is_named(tmp_path, name, message):
    folder = release(tmp_path / "model")
    (folder / name).unlink()

    with pytest.raises(InputError, match=message) as raised:
        fairseq_folders.read_folder(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "dict.txt",
            r"\Z",
            "madeupword7 0\n",
            r"dict\.txt does not fit .*model\.pt: .* it has 330, and the model 329",
        ),
        (
            "dict.txt",
            r"\A.*\n",
            "",
            r"dict\.txt lacks 1 of the 317 tokens of encoder\.json, 78 among them",
        ),
        (
            "dict.txt",
            "madeupword0006",
            "hello",
            r"dict\.txt line 324 has 'hello'; expected a number that encoder\.json",
        ),
        (
            "dict.txt",
            "madeupword0006",
            "madeupword0000",
            r"dict\.txt line 324 has 'madeupword0000', .* there already",
        ),
        (
            "dict.txt",
            r"\A.*",
            "17",
            r"dict\.txt line 1 is '17'; expected a symbol, a space and its count",
        ),
        (
            "dict.txt",
            r"\A",
            "\udcff 3\n",
            r"dict\.txt is not UTF-8 \(byte 0\); expected fairseq's dictionary",
        ),
        (
            "encoder.json",
            "(?s).*",
            "{",
            r"encoder\.json is not JSON \(.*\); expected GPT-2's encoder\.json",
        ),
        ("encoder.json", "(?s).*", "[1]", r"does not map tokens to numbers"),
        (
            "encoder.json",
            "(?s).*",
            '{"a": 1}',
            r"encoder\.json has no token for 255 of the 256 bytes, '!' among them",
        ),
        (
            "vocab.bpe",
            "\n.*",
            "\nq z",
            r"vocab\.bpe line 2 is 'q z'; expected two tokens whose union encoder\.json has",
        ),
        (
            "vocab.bpe",
            "\n.*",
            "\nt",
            r"vocab\.bpe line 2 is 't'; expected two tokens",
        ),
    ],
)
def test_a_broken_file_of_a_folder_is_named(tmp_path, name, old, new, message):
    """`old` is replaced by `new`, once."""
    folder = release(tmp_path / "model")
    text = (folder / name).read_text(encoding="utf-8")
    content = re.sub(old, new, text, count=1)
    (folder / name).write_bytes(content.encode(errors="surrogateescape"))

    with pytest.raises(InputError, match=message) as raised:
        fairseq_folders.read_folder(folder)
    assert str(folder) in str(raised.value)


# ---- tokenizers that do not fit ----------------------------------------------------------------
def assert_not_written(
    folder: Path, tokenizer: RobertaTokenizer, model: RobertaForMaskedLM, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fairseq_folders.write_folder(folder, model.config, model.state_dict(), tokenizer)
    assert not folder.exists(), "nothing is written by halves"


def test_a_tokenizer_that_fairseq_cannot_be_is_refused(tmp_path):
    model = random_model(LEARNT_WORDS)
    vocab = learnt_tokenizer().get_vocab()

    with_prefix = RobertaTokenizer(vocab=vocab, merges=[], add_prefix_space=True)
    message = r"byte-level BPE without add_prefix_space"
    assert_not_written(tmp_path / "out", with_prefix, model, message)

    next_ids = {token: (number + 1) % LEARNT_WORDS for token, number in vocab.items()}
    shifted = RobertaTokenizer(vocab=next_ids, merges=[])
    message = "begins with <mask> <s> <pad> </s>; fairseq needs <s> <pad>"
    assert_not_written(tmp_path / "out", shifted, model, message)

    with_added = learnt_tokenizer()
    with_added.add_tokens(["zebra"])
    message = r"has 1 added tokens, 'zebra' among them"
    assert_not_written(tmp_path / "out", with_added, model, message)


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    smaller = random_model(300)

    message = "has 322 tokens and the model 300; expected those of one"
    assert_not_written(tmp_path / "out", learnt_tokenizer(), smaller, message)


def test_a_dictionary_is_written_without_the_mask(tmp_path):
    folder = tmp_path / "out"
    model = random_model(LEARNT_WORDS)

    fairseq_folders.write_folder(folder, model.config, model.state_dict(), learnt_tokenizer())

    assert MASK not in (folder / "dict.txt").read_text(), "fairseq's task appends it"


# ---- fairseq itself ----------------------------------------------------------------------------
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
ids = [hub.encode(sentence) for sentence in sentences]
ids = collate_tokens(ids, hub.task.source_dictionary.pad())
found = {"ids": ids.numpy(), "mask": hub.task.mask_idx}
with torch.no_grad():
    found["logits"] = hub.model(tokens)[0].numpy()
np.savez(out, **found)
"""


@live
@pytest.mark.parametrize(("tied", "words"), [(True, LEARNT_WORDS), (False, 336)])
def test_fairseq_loads_what_we_write_with_our_ids_and_logits(tmp_path, tied, words):
    folder = tmp_path / "model"
    tokenizer = learnt_tokenizer()
    model = random_model(words, tie_word_embeddings=tied, type_vocab_size=2)
    fairseq_folders.write_folder(folder, model.config, model.state_dict(), tokenizer)
    text = arrays("roberta_bpe.npz")["sentences"].tolist()
    tokens = tokenizer(text, padding=True, return_tensors="pt")["input_ids"]
    masked = tokens.clone()
    masked[:, 1] = tokenizer.mask_token_id

    np.savez(tmp_path / "in.npz", sentences=np.array(text), tokens=masked.numpy())
    with_fairseq("-c", HUB, folder, tmp_path / "in.npz", tmp_path / "out.npz")

    found = arrays("out.npz", tmp_path)
    np.testing.assert_array_equal(found["ids"], tokens)
    assert found["mask"] == 321
    assert tokenizer.mask_token_id == 321
    is_real = masked != PAD
    config, state_dict, _ = fairseq_folders.read_folder(folder)
    for ours in (model, build(config, state_dict)):
        expected = logits(ours, masked)[is_real]
        np.testing.assert_allclose(found["logits"][is_real], expected, rtol=1e-5, atol=1e-5)
