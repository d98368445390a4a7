"""fairseq's RoBERTa as transformers' RobertaForMaskedLM, and back, with equal logits.

RoBERTa (Liu et al. 2019, https://arxiv.org/abs/1907.11692) was trained with fairseq. A released
model is a folder:

    model.pt      the checkpoint, see models/fairseq_files.py
    dict.txt      numbers of GPT-2's tokens with their counts, most frequent first
    encoder.json  GPT-2's byte-level BPE: token -> number
    vocab.bpe     its merges

Ids are <s> 0, <pad> 1, </s> 2, <unk> 3, then the lines of dict.txt, then <mask>, unless dict.txt
has it already. fairseq's archives leave out encoder.json and vocab.bpe, which are the same for all
of them.
"""

import argparse
import io
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import (
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaTokenizer,
)

from errors import InputError
from models import fairseq_files

PAD = 1
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"
# Rows that fairseq adds so that the vocabulary is a multiple of 8.
FILLER = re.compile(r"madeupword\d+")
FILES = ("model.pt", "dict.txt", "encoder.json", "vocab.bpe")
BPE_FILES = "https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/"

# fairseq's switches that change the numbers or the training, with the value that transformers'
# RoBERTa has. Its head has exact gelu whatever hidden_act says, so no other activation is possible.
UNSUPPORTED = {
    "activation_fn": "gelu",
    "encoder_normalize_before": False,
    "layernorm_embedding": True,
    "no_scale_embedding": True,
    "encoder_learned_pos": True,
    "no_token_positional_embeddings": False,
    "adaptive_input": False,
    "activation_dropout": 0,
    "encoder_layerdrop": 0,
    "encoder_layers_to_keep": None,
    "quant_noise_pq": 0,
    "quant_noise_scalar": 0,
}
EPSILON = 1e-5  # of every layer norm of fairseq
# Row of the first token in the position embeddings of both libraries; padding has row PAD, and row
# 0 is unused.
OFFSET = PAD + 1

ENCODER = "encoder.sentence_encoder."
OUTSIDE = {  # module of fairseq -> module of transformers
    f"{ENCODER}embed_tokens": "roberta.embeddings.word_embeddings",
    f"{ENCODER}embed_positions": "roberta.embeddings.position_embeddings",
    f"{ENCODER}layernorm_embedding": "roberta.embeddings.LayerNorm",
    "encoder.lm_head.dense": "lm_head.dense",
    "encoder.lm_head.layer_norm": "lm_head.layer_norm",
    "encoder.lm_head": "lm_head.decoder",
}
LAYER = {  # the same inside a layer
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.output.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "output.LayerNorm",
}
# Names in fairseq.
TOKENS = f"{ENCODER}embed_tokens.weight"
POSITIONS = f"{ENCODER}embed_positions.weight"
HEAD = "encoder.lm_head.weight"
# Names in transformers.
TOKEN_TYPES = "roberta.embeddings.token_type_embeddings.weight"
TIED_WEIGHTS = ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight")
# One tensor in fairseq; transformers computes with the second.
HEAD_BIASES = ("lm_head.bias", "lm_head.decoder.bias")


class Converted(dict[str, Tensor]):
    """A state_dict of RobertaForMaskedLM.

    `left_out` names the classification heads that it does not have.
    """

    left_out: tuple[str, ...] = ()


def head_names(weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Returns the names of the classification heads in a state_dict of fairseq."""
    names = {key.split(".")[1] for key in weights if key.startswith("classification_heads.")}
    return tuple(sorted(names))


def _modules(layers: int) -> dict[str, str]:
    """Returns all modules: name in fairseq -> name in transformers."""
    modules = dict(OUTSIDE)
    for layer in range(layers):
        for theirs, ours in LAYER.items():
            modules[f"{ENCODER}layers.{layer}.{theirs}"] = f"roberta.encoder.layer.{layer}.{ours}"
    return modules


def _shapes(config: RobertaConfig) -> dict[str, torch.Size]:
    """Returns the shapes in the state_dict of a RobertaForMaskedLM."""
    with torch.device("meta"):
        model = RobertaForMaskedLM(config)
    return {key: value.shape for key, value in model.state_dict().items()}


def _upgrade_names(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Returns the weights under fairseq 0.12's names, without classification heads.

    `RobertaModel.upgrade_state_dict_named` gives these names in fairseq.
    """
    upgraded = {}
    for key, value in weights.items():
        key = re.sub(r"^decoder", "encoder", key)
        key = key.replace(".emb_layer_norm.", ".layernorm_embedding.")
        key = key.replace(".layer_norms.0.", ".self_attn_layer_norm.")
        key = key.replace(".layer_norms.1.", ".final_layer_norm.")
        upgraded[key] = value

    # data2vec is a RoBERTa with another objective. What belongs to that is dropped, and the head
    # for masked tokens was never trained.
    is_data2vec = upgraded.pop("encoder._ema", None) is not None
    if is_data2vec and HEAD not in upgraded and TOKENS in upgraded:
        warnings.warn(
            f"{name} has no head for masked tokens (data2vec): it starts at random",
            stacklevel=3,
        )
        upgraded |= _new_head(upgraded[TOKENS])

    heads = head_names(upgraded)
    if heads:
        warnings.warn(
            f"{name} has classification heads, which are left out: {', '.join(heads)}",
            stacklevel=3,
        )

    dropped = ("encoder.regression_head", "classification_heads.")
    kept = {key: value for key, value in upgraded.items() if not key.startswith(dropped)}
    return fairseq_files.upgrade_names(kept)


def _new_head(embedding: Tensor) -> dict[str, Tensor]:
    """Returns an untrained head for masked tokens, tied to an embedding [words, dim]."""
    words, dim = embedding.shape
    return {
        HEAD: embedding,
        "encoder.lm_head.bias": torch.zeros(words),
        "encoder.lm_head.dense.weight": torch.empty(dim, dim).normal_(std=0.02),
        "encoder.lm_head.dense.bias": torch.zeros(dim),
        "encoder.lm_head.layer_norm.weight": torch.ones(dim),
        "encoder.lm_head.layer_norm.bias": torch.zeros(dim),
    }


def _configuration(settings: Mapping[str, Any], words: int) -> RobertaConfig:
    """Returns transformers' configuration; what the settings leave out has fairseq's default."""
    tokens = settings.get("max_positions") or settings.get("tokens_per_sample") or 512
    return RobertaConfig(
        vocab_size=words,
        hidden_size=settings.get("encoder_embed_dim", 768),
        num_hidden_layers=settings.get("encoder_layers", 12),
        num_attention_heads=settings.get("encoder_attention_heads", 12),
        intermediate_size=settings.get("encoder_ffn_embed_dim", 3072),
        hidden_dropout_prob=settings.get("dropout", 0.1),
        attention_probs_dropout_prob=settings.get("attention_dropout", 0.1),
        classifier_dropout=settings.get("pooler_dropout", 0.0),
        max_position_embeddings=tokens + OFFSET,
        type_vocab_size=1,
        layer_norm_eps=EPSILON,
        tie_word_embeddings=not settings.get("untie_weights_roberta", False),
    )


def to_transformers(
    weights: Mapping[str, Tensor],
    args: argparse.Namespace | Mapping[str, Any],
    name: str = "the checkpoint",
) -> tuple[RobertaConfig, dict[str, Tensor]]:
    """Returns config and state_dict of a RobertaForMaskedLM with the logits of fairseq's model.

    The logits of real tokens are equal if attention_mask is 0 at <pad>: fairseq finds the padding
    itself. Names of older versions of fairseq are known. Classification heads are left out, with a
    warning, as fairseq leaves them out.

    Args:
        weights, args: the checkpoint's state_dict and settings, as `fairseq_files.read_checkpoint`
            returns them. What the settings leave out has fairseq's default.
        name: the checkpoint's path, for messages.

    Raises:
        InputError: not a RoBERTa, a RoBERTa that transformers' class cannot be, or weights and
            settings that disagree.
    """
    settings = vars(args) if isinstance(args, argparse.Namespace) else args
    weights = _upgrade_names(weights, name)
    if TOKENS not in weights:
        kind = settings.get("arch") or settings.get("_name") or "another model"
        raise InputError(
            f"{name} holds fairseq's {kind}; expected a RoBERTa, with a tensor {TOKENS}"
        )
    for switch, value in UNSUPPORTED.items():
        if settings.get(switch, value) != value:
            raise InputError(
                f"{name} has {switch} {settings[switch]}; transformers' RoBERTa has {value} only"
            )

    config = _configuration(settings, len(weights[TOKENS]))
    converted = _renamed(weights, config, name)
    if config.tie_word_embeddings:
        if not torch.equal(weights[TOKENS], weights[HEAD]):
            raise InputError(
                f"{name} does not fit its settings: they tie {HEAD} to {TOKENS}, and the two differ"
            )
        words, head = TIED_WEIGHTS
        converted[head] = converted[words]
    return config, converted


def _renamed(weights: dict[str, Tensor], config: RobertaConfig, name: str) -> dict[str, Tensor]:
    """Returns fairseq's weights as the state_dict of a RobertaForMaskedLM.

    Raises:
        InputError: names or shapes are not those of the configuration.
    """
    modules = _modules(config.num_hidden_layers)
    converted = {}
    unknown = []
    for key, value in weights.items():
        module, _, kind = key.rpartition(".")
        if module in modules:
            converted[f"{modules[module]}.{kind}"] = value
        else:
            unknown.append(key)

    converted[TOKEN_TYPES] = torch.zeros(1, config.hidden_size)  # fairseq has none
    unused_bias, bias = HEAD_BIASES
    if bias in converted:
        converted[unused_bias] = converted[bias]

    expected = _shapes(config)
    wrong = sorted(unknown) + sorted(expected.keys() ^ converted.keys())
    for key in expected.keys() & converted.keys():
        if expected[key] != converted[key].shape:
            wrong.append(key)
    if wrong:
        raise InputError(
            f"{name} does not fit its settings: {wrong[0]} and {len(wrong) - 1} more tensors differ"
        )
    return {key: converted[key] for key in expected}


def _complete(config: RobertaConfig, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a RobertaForMaskedLM's state_dict in float32 on the host.

    What is tied has both of its names.

    Raises:
        InputError: config and state_dict disagree.
    """
    given = {key: value.detach().to("cpu", torch.float32) for key, value in state_dict.items()}
    if config.tie_word_embeddings:
        _tie(given, *TIED_WEIGHTS)
        _tie(given, *HEAD_BIASES)

    expected = _shapes(config)
    # Older files have a buffer of position numbers, which is no weight.
    names = given.keys() - {"roberta.embeddings.position_ids"}
    wrong = sorted(expected.keys() ^ names)
    for key in expected:
        if key in names and given[key].shape != expected[key]:
            wrong.append(key)
    if wrong:
        raise InputError(
            "not a RobertaForMaskedLM of its config: "
            f"{wrong[0]} and {len(wrong) - 1} more tensors differ"
        )
    return given


def _tie(weights: dict[str, Tensor], first: str, second: str) -> None:
    """Gives a tied tensor both of its names, of which a safetensors file has one.

    Raises:
        InputError: it has both, for different tensors.
    """
    if first not in weights and second not in weights:
        return

    weights.setdefault(first, weights.get(second))
    weights.setdefault(second, weights[first])
    if not torch.equal(weights[first], weights[second]):
        raise InputError(
            f"the model's config ties {first} and {second}, and the two differ: tie_weights()"
        )
    weights[second] = weights[first]


def _settings(config: RobertaConfig) -> argparse.Namespace:
    """Returns fairseq's settings of a configuration."""
    positions = config.max_position_embeddings - OFFSET
    dropout = config.hidden_dropout_prob
    pooler_dropout = config.classifier_dropout
    if pooler_dropout is None:
        pooler_dropout = dropout
    return argparse.Namespace(
        arch="roberta",
        task="masked_lm",
        criterion="masked_lm",
        optimizer="adam",
        lr_scheduler="polynomial_decay",
        lr=[5e-4],
        data=".",
        bpe="gpt2",
        sample_break_mode="complete",
        tokens_per_sample=positions,
        max_positions=positions,
        encoder_layers=config.num_hidden_layers,
        encoder_embed_dim=config.hidden_size,
        encoder_ffn_embed_dim=config.intermediate_size,
        encoder_attention_heads=config.num_attention_heads,
        activation_fn="gelu",
        pooler_activation_fn="tanh",
        dropout=dropout,
        attention_dropout=config.attention_probs_dropout_prob,
        activation_dropout=0.0,
        pooler_dropout=pooler_dropout,
        untie_weights_roberta=not config.tie_word_embeddings,
    )


def from_transformers(
    config: RobertaConfig, state_dict: Mapping[str, Tensor]
) -> tuple[argparse.Namespace, dict[str, Tensor]]:
    """Returns settings and state_dict of fairseq 0.12's RobertaModel for a RobertaForMaskedLM.

    The logits are equal. The weights are float32, on the host. fairseq has no token types: the
    embedding of type 0, which every token of a RoBERTa has, is added to the positions.

    Args:
        config: the model's.
        state_dict: the model's; tied tensors may be there once.

    Raises:
        InputError: a model that fairseq's RoBERTa cannot be, or config and state_dict that
            disagree.
    """
    required = {
        "model_type": "roberta",
        "hidden_act": "gelu",
        "layer_norm_eps": EPSILON,
        "pad_token_id": PAD,
        "is_decoder": False,
    }
    for key, value in required.items():
        own = getattr(config, key)
        if own != value:
            raise InputError(f"the model's {key} is {own!r}; fairseq's RoBERTa has {value!r} only")

    given = _complete(config, state_dict)
    weights = {}
    for theirs, ours in _modules(config.num_hidden_layers).items():
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" in given:
                weights[f"{theirs}.{kind}"] = given[f"{ours}.{kind}"]

    positions = weights[POSITIONS].clone()
    positions[OFFSET:] += given[TOKEN_TYPES][0]
    weights[POSITIONS] = positions
    weights[f"{ENCODER}version"] = torch.tensor([3.0])  # as fairseq 0.12 writes it
    return _settings(config), weights


def write_checkpoint(
    args: argparse.Namespace, weights: Mapping[str, Tensor], updates: int = 0
) -> bytes:
    """Returns the content of a file that fairseq 0.12 and `fairseq_files.read_checkpoint` load.

    Args:
        args, weights: as `from_transformers` returns them.
        updates: number of training steps, for information.
    """
    history = {
        "criterion_name": "MaskedLmLoss",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {},
        "num_updates": updates,
    }
    state = {
        "args": args,
        "cfg": None,
        "model": dict(weights),
        "task_state": {},
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _byte_symbols() -> list[str]:
    """Returns the characters that stand for the 256 bytes, in the order of GPT-2's numbers.

    Printable bytes stand for themselves. The others are characters from 256 on (Radford et al.
    2019, `encoder.py`).
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = range(256, 256 + 256 - len(printable))
    return [chr(code) for code in (*printable, *others)]


def _read_text(path: Path, what: str) -> str:
    """Reads a UTF-8 file; raises InputError where it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}); expected {what}") from error


def _read_symbols(path: Path) -> list[str]:
    """Returns the symbols of fairseq's dict.txt; raises InputError that names a wrong line."""
    lines = _read_text(path, "fairseq's dictionary").removesuffix("\n").split("\n")
    symbols = []
    for number, line in enumerate(lines, start=1):
        entry = line.rstrip().removesuffix(" #fairseq:overwrite")
        symbol, space, count = entry.rpartition(" ")
        if not space or not count.lstrip("-").isdecimal():
            raise InputError(
                f"{path} line {number} is {line[:60]!r}; expected a symbol, a space and its count"
            )
        symbols.append(symbol)
    return symbols


def _read_numbers(path: Path) -> dict[str, int]:
    """Returns the numbers of tokens in GPT-2's encoder.json; raises InputError where it is none."""
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); expected GPT-2's encoder.json") from error

    is_table = isinstance(numbers, dict) and all(isinstance(n, int) for n in numbers.values())
    if not is_table:
        raise InputError(f"{path} does not map tokens to numbers; expected GPT-2's encoder.json")

    missing = [symbol for symbol in _byte_symbols() if symbol not in numbers]
    if missing:
        raise InputError(
            f"{path} has no token for {len(missing)} of the 256 bytes, {missing[0]!r} among them"
        )
    return numbers


def _read_merges(path: Path, numbers: dict[str, int]) -> list[tuple[str, str]]:
    """Returns the merges in GPT-2's vocab.bpe; raises InputError that names a wrong line."""
    lines = _read_text(path, "GPT-2's vocab.bpe").split("\n")
    merges = []
    # The first line says a version, and the last one is empty.
    for number, line in enumerate(lines[1:-1], start=2):
        pair = tuple(line.split())
        if len(pair) != 2 or not {*pair, "".join(pair)} <= numbers.keys():
            raise InputError(
                f"{path} line {number} is {line[:60]!r}; "
                "expected two tokens whose union encoder.json has"
            )
        merges.append(pair)
    return merges


def _read_tokenizer(folder: Path, positions: int) -> RobertaTokenizer:
    """Returns transformers' tokenizer with fairseq's ids, for rows of so many tokens."""
    numbers = _read_numbers(folder / "encoder.json")
    merges = _read_merges(folder / "vocab.bpe", numbers)
    vocabulary = _read_vocabulary(folder / "dict.txt", numbers)
    # A mask takes the space before it, as the word that it hides would have.
    mask = AddedToken(MASK, lstrip=True, special=True)
    return RobertaTokenizer(
        vocab=vocabulary,
        merges=merges,
        mask_token=mask,
        model_max_length=positions,
    )


def _read_vocabulary(path: Path, numbers: dict[str, int]) -> dict[str, int]:
    """Returns the ids of GPT-2's tokens by fairseq's dict.txt, which has their numbers.

    Raises:
        InputError: dict.txt and the tokens of encoder.json, which `numbers` has, do not fit.
    """
    symbols = [*SPECIALS, *_read_symbols(path)]
    tokens = {str(number): token for token, number in numbers.items()}
    lost = tokens.keys() - set(symbols)
    if lost:
        # fairseq would read those as <unk>; transformers' BPE cannot.
        raise InputError(
            f"{path} lacks {len(lost)} of the {len(numbers)} tokens of encoder.json, "
            f"{min(lost, key=int)} among them; "
            "expected all: give fairseq-preprocess a --srcdict that has them"
        )
    if MASK not in symbols:
        symbols.append(MASK)

    vocabulary: dict[str, int] = {}
    for token_id, symbol in enumerate(symbols):
        where = f"{path} line {token_id + 1 - len(SPECIALS)} has {symbol[:60]!r}"
        is_number = symbol not in (*SPECIALS, MASK) and not FILLER.fullmatch(symbol)
        token = tokens.get(symbol) if is_number else symbol
        if token is None:
            raise InputError(f"{where}; expected a number that encoder.json has")
        if token in vocabulary:
            raise InputError(f"{where}, a token that is there already: {token!r}")
        vocabulary[token] = token_id
    return vocabulary


def read_folder(path: str | Path) -> tuple[RobertaConfig, Converted, RobertaTokenizer]:
    """Reads a RoBERTa of fairseq for transformers.

    The ids of text are those of fairseq's `RobertaHubInterface.encode`, with one difference:
    transformers takes special tokens that are written out in a text, such as "<mask>", for the
    special tokens.

    Args:
        path: folder with model.pt, dict.txt, encoder.json and vocab.bpe.

    Returns:
        The configuration, the state_dict of RobertaForMaskedLM, and the tokenizer.

    Raises:
        InputError: a file is missing or of another kind; the dictionary does not fit; see also
            `to_transformers`.
    """
    folder = Path(path)
    _require_files(folder)
    checkpoint = folder / "model.pt"
    settings, weights = fairseq_files.read_checkpoint(checkpoint.read_bytes(), str(checkpoint))
    config, state_dict = to_transformers(weights, settings, str(checkpoint))

    tokenizer = _read_tokenizer(folder, config.max_position_embeddings - OFFSET)
    if len(tokenizer) != config.vocab_size:
        raise InputError(
            f"{folder / 'dict.txt'} does not fit {checkpoint}: "
            f"with the special symbols it has {len(tokenizer)}, "
            f"and the model {config.vocab_size}; "
            "expected the dictionary that the model was trained with"
        )

    converted = Converted(state_dict)
    converted.left_out = head_names(weights)
    return config, converted, tokenizer


def _require_files(folder: Path) -> None:
    """Raises InputError where one of FILES is missing."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if not missing:
        return
    hint = ""
    if "encoder.json" in missing or "vocab.bpe" in missing:
        hint = f"; {BPE_FILES} has encoder.json and vocab.bpe"
    raise InputError(
        f"{folder} has no {' nor '.join(missing)}; expected a RoBERTa of fairseq{hint}"
    )


def _is_gpt2_bpe(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether a tokenizer is GPT-2's byte-level BPE without add_prefix_space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    rules = json.loads(backend.to_str())
    splitter = rules.get("pre_tokenizer") or {}
    return (
        rules.get("model", {}).get("type") == "BPE"
        and not rules.get("normalizer")
        and splitter.get("type") == "ByteLevel"
        and not splitter.get("add_prefix_space")
        and splitter.get("use_regex", True)
    )


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, words: int) -> None:
    """Raises InputError where fairseq cannot have the tokenizer of a model with so many tokens."""
    if not _is_gpt2_bpe(tokenizer):
        raise InputError(
            "the tokenizer is not GPT-2's byte-level BPE without add_prefix_space; "
            "fairseq knows that one"
        )

    vocabulary = tokenizer.get_vocab()
    first = tuple(tokenizer.convert_ids_to_tokens([0, 1, 2, 3]))
    if first != SPECIALS or MASK not in vocabulary:
        raise InputError(
            f"the tokenizer begins with {' '.join(first)}; "
            f"fairseq needs {' '.join(SPECIALS)}, and {MASK}"
        )

    extra = set(tokenizer.get_added_vocab()) - {*SPECIALS, MASK}
    if extra:
        raise InputError(
            f"the tokenizer has {len(extra)} added tokens, {min(extra)!r} among them; "
            "fairseq knows none"
        )

    if len(vocabulary) > words or max(vocabulary.values()) >= words:
        raise InputError(
            f"the tokenizer has {len(vocabulary)} tokens and the model {words}; "
            "expected those of one"
        )


def _write_tokenizer(tokenizer: PreTrainedTokenizerBase, words: int) -> dict[str, bytes]:
    """Returns the content of dict.txt, encoder.json and vocab.bpe.

    Args:
        tokenizer: of the model.
        words: tokens of the model, which may be more than the tokenizer's.
    """
    _check_tokenizer(tokenizer, words)
    vocabulary = tokenizer.get_vocab()
    own = {*SPECIALS, MASK}  # tokens that fairseq writes as they are
    own |= {token for token in vocabulary if FILLER.fullmatch(token)}

    merges = _merges(tokenizer)
    numbers = _gpt2_numbers(vocabulary, merges, own)
    symbol_of_id = {}
    for token, token_id in vocabulary.items():
        symbol_of_id[token_id] = token if token in own else str(numbers[token])

    symbols = _with_fillers(symbol_of_id, words, own)
    if symbols[-1] == MASK:  # fairseq's task appends it
        symbols.pop()
    # fairseq needs a count for each symbol; it is not known.
    dictionary = [f"{symbol} 0\n" for symbol in symbols[len(SPECIALS) :]]
    bpe = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    return {
        "dict.txt": "".join(dictionary).encode(),
        "encoder.json": json.dumps(numbers).encode(),
        "vocab.bpe": "\n".join(bpe).encode(),
    }


def _merges(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Returns the merges of a BPE, each of them two tokens."""
    merges = []
    for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]:
        if isinstance(pair, str):  # as older versions of tokenizers write it
            pair = pair.split(" ")
        merges.append(tuple(pair))
    return merges


def _gpt2_numbers(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], own: set[str]
) -> dict[str, int]:
    """Returns GPT-2's numbers of all tokens that are not in `own`.

    Bytes come first, then what the merges make, then the rest (<|endoftext|>) in the order of ids.

    Raises:
        InputError: the vocabulary lacks a token of the BPE.
    """
    tokens = dict.fromkeys(_byte_symbols())  # in order, each once
    for left, right in merges:
        tokens[left + right] = None
    rest = vocabulary.keys() - own - tokens.keys()
    tokens |= dict.fromkeys(sorted(rest, key=vocabulary.get))

    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise InputError(
            f"the tokenizer has no id for {len(missing)} tokens of its BPE, "
            f"{missing[0]!r} among them"
        )
    return {token: number for number, token in enumerate(tokens)}


def _with_fillers(symbol_of_id: dict[int, str], words: int, own: set[str]) -> list[str]:
    """Returns a symbol for each of so many ids; those without one become fillers that `own` lacks.

    Models are padded to round sizes.
    """
    symbols = []
    filler = 0
    for token_id in range(words):
        if token_id in symbol_of_id:
            symbols.append(symbol_of_id[token_id])
            continue
        while f"madeupword{filler:04d}" in own:
            filler += 1
        symbols.append(f"madeupword{filler:04d}")
        filler += 1
    return symbols


def write_folder(
    path: str | Path,
    config: RobertaConfig,
    state_dict: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Writes a RobertaForMaskedLM and its tokenizer as a folder that fairseq 0.12 loads:

        RobertaModel.from_pretrained(
            path,
            gpt2_encoder_json=f"{path}/encoder.json",
            gpt2_vocab_bpe=f"{path}/vocab.bpe",
        )

    Args:
        path: folder, which is created; files of the same names are replaced.
        config, state_dict: of the model.
        tokenizer: byte-level BPE with <s> 0, <pad> 1, </s> 2, <unk> 3 and <mask>.

    Raises:
        InputError: fairseq cannot have the tokenizer, or it is another model's; see also
            `from_transformers`.
    """
    args, weights = from_transformers(config, state_dict)
    files = _write_tokenizer(tokenizer, config.vocab_size)
    files["model.pt"] = write_checkpoint(args, weights)

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
