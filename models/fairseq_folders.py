"""fairseq's RoBERTa as transformers' RobertaForMaskedLM, and back, with equal logits; the folders of both.

RoBERTa (Liu et al. 2019, https://arxiv.org/abs/1907.11692) was trained with fairseq. A released model is a folder:

    model.pt      the checkpoint, see models/fairseq_files.py
    dict.txt      numbers of GPT-2's tokens with their counts, most frequent first; the line decides the id
    encoder.json  GPT-2's byte-level BPE: token -> number
    vocab.bpe     its merges

Ids are <s> 0, <pad> 1, </s> 2, <unk> 3, then the lines of dict.txt, then <mask>, unless dict.txt has it already.
fairseq's archives leave out encoder.json and vocab.bpe, which are the same for all of them.
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
from transformers import PreTrainedTokenizerBase, RobertaConfig, RobertaForMaskedLM, RobertaTokenizer

from errors import InputError
from models import fairseq_files

PAD, SPECIALS, MASK = 1, ("<s>", "<pad>", "</s>", "<unk>"), "<mask>"
FILES = ("model.pt", "dict.txt", "encoder.json", "vocab.bpe")
BPE_FILES = "https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/"
# Rows that fairseq adds so that the vocabulary is a multiple of 8.
FILLER = re.compile(r"madeupword\d+")

# fairseq's switches that change the numbers or the training, with the value that transformers' RoBERTa has. Its head
# has exact gelu whatever hidden_act says, so no other activation can be had.
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
# Row of the first token in the position embeddings of both libraries; padding has row PAD, and row 0 is unused.
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
TOKENS, POSITIONS = f"{ENCODER}embed_tokens.weight", f"{ENCODER}embed_positions.weight"
TOKEN_TYPES = "roberta.embeddings.token_type_embeddings.weight"
HEAD = "encoder.lm_head.weight"
HEAD_BIASES = ("lm_head.bias", "lm_head.decoder.bias")  # one tensor in fairseq; transformers computes with the second


class Converted(dict[str, Tensor]):
    """A state_dict of RobertaForMaskedLM, and the names of the classification heads that were left out."""

    left_out: tuple[str, ...] = ()


def head_names(weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Returns the names of the classification heads in a state_dict of fairseq."""
    return tuple(sorted({key.split(".")[1] for key in weights if key.startswith("classification_heads.")}))


def _modules(layers: int) -> dict[str, str]:
    """Returns all modules: name in fairseq -> name in transformers."""
    inside = {
        f"{ENCODER}layers.{layer}.{theirs}": f"roberta.encoder.layer.{layer}.{ours}"
        for layer in range(layers)
        for theirs, ours in LAYER.items()
    }
    return OUTSIDE | inside


def _shapes(config: RobertaConfig) -> dict[str, torch.Size]:
    """Returns the shapes in the state_dict of a RobertaForMaskedLM."""
    with torch.device("meta"):
        return {key: value.shape for key, value in RobertaForMaskedLM(config).state_dict().items()}


def _upgrade_names(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Returns the weights under fairseq 0.12's names, as its `RobertaModel.upgrade_state_dict_named` gives them."""
    upgraded = {}
    for key, value in weights.items():
        key = re.sub(r"^decoder", "encoder", key).replace(".emb_layer_norm.", ".layernorm_embedding.")
        key = key.replace(".layer_norms.0.", ".self_attn_layer_norm.").replace(".layer_norms.1.", ".final_layer_norm.")
        upgraded[key] = value
    # data2vec is a RoBERTa with another objective: its own parts are dropped, and its head was never trained.
    distilled = upgraded.pop("encoder._ema", None) is not None
    upgraded = {key: value for key, value in upgraded.items() if not key.startswith("encoder.regression_head")}
    if distilled and HEAD not in upgraded and TOKENS in upgraded:
        warnings.warn(f"{name} has no head for masked tokens (data2vec): it starts at random", stacklevel=3)
        words, dim = upgraded[TOKENS].shape
        upgraded[HEAD], upgraded["encoder.lm_head.bias"] = upgraded[TOKENS], torch.zeros(words)
        upgraded["encoder.lm_head.dense.weight"] = torch.empty(dim, dim).normal_(std=0.02)
        upgraded["encoder.lm_head.dense.bias"] = torch.zeros(dim)
        upgraded["encoder.lm_head.layer_norm.weight"] = torch.ones(dim)
        upgraded["encoder.lm_head.layer_norm.bias"] = torch.zeros(dim)
    heads = head_names(upgraded)
    if heads:
        warnings.warn(f"{name} has classification heads, which are left out: {', '.join(heads)}", stacklevel=3)
    kept = {key: value for key, value in upgraded.items() if not key.startswith("classification_heads.")}
    return fairseq_files.upgrade_names(kept)


def _configuration(settings: Mapping[str, Any], words: int) -> RobertaConfig:
    """Returns transformers' configuration; what the settings leave out has fairseq's default."""
    return RobertaConfig(
        vocab_size=words,
        hidden_size=settings.get("encoder_embed_dim", 768),
        num_hidden_layers=settings.get("encoder_layers", 12),
        num_attention_heads=settings.get("encoder_attention_heads", 12),
        intermediate_size=settings.get("encoder_ffn_embed_dim", 3072),
        hidden_dropout_prob=settings.get("dropout", 0.1),
        attention_probs_dropout_prob=settings.get("attention_dropout", 0.1),
        classifier_dropout=settings.get("pooler_dropout", 0.0),
        max_position_embeddings=(settings.get("max_positions") or settings.get("tokens_per_sample") or 512) + OFFSET,
        type_vocab_size=1,
        layer_norm_eps=EPSILON,
        tie_word_embeddings=not settings.get("untie_weights_roberta", False),
    )


def to_transformers(
    weights: Mapping[str, Tensor], args: argparse.Namespace | Mapping[str, Any], name: str = "the checkpoint"
) -> tuple[RobertaConfig, dict[str, Tensor]]:
    """Returns config and state_dict of a RobertaForMaskedLM that has the logits of fairseq's RobertaModel.

    The logits of real tokens are equal if attention_mask is 0 at <pad>: fairseq finds the padding itself. Names of
    older versions of fairseq are known. Classification heads are left out, with a warning, as fairseq leaves them out.

    Args:
        weights, args: the checkpoint's state_dict and settings, as `fairseq_files.read_checkpoint` returns them; what
            the settings leave out has fairseq's default.
        name: the checkpoint's path, for messages.

    Raises:
        InputError: not a RoBERTa, a RoBERTa that transformers' class cannot be, or weights and settings that disagree.
    """
    settings = vars(args) if isinstance(args, argparse.Namespace) else args
    weights = _upgrade_names(dict(weights), name)
    if TOKENS not in weights:
        architecture = settings.get("arch") or settings.get("_name") or "another model"
        raise InputError(f"{name} holds fairseq's {architecture}; expected a RoBERTa, with a tensor {TOKENS}")
    for switch, value in UNSUPPORTED.items():
        if settings.get(switch, value) != value:
            raise InputError(f"{name} has {switch} {settings[switch]}; transformers' RoBERTa has {value} only")
    config = _configuration(settings, len(weights[TOKENS]))
    modules, converted, unknown = _modules(config.num_hidden_layers), {}, []
    for key, value in weights.items():
        module, _, kind = key.rpartition(".")
        if module in modules:
            converted[f"{modules[module]}.{kind}"] = value
        else:
            unknown.append(key)
    converted[TOKEN_TYPES] = torch.zeros(1, config.hidden_size)  # fairseq has none
    if HEAD_BIASES[1] in converted:
        converted[HEAD_BIASES[0]] = converted[HEAD_BIASES[1]]
    expected = _shapes(config)
    wrong = sorted(unknown) + sorted(expected.keys() ^ converted.keys())
    wrong += [key for key in expected.keys() & converted.keys() if expected[key] != converted[key].shape]
    if wrong:
        raise InputError(f"{name} does not fit its settings: {wrong[0]} and {len(wrong) - 1} more tensors differ")
    if config.tie_word_embeddings:
        if not torch.equal(weights[TOKENS], weights[HEAD]):
            raise InputError(f"{name} does not fit its settings: they tie {HEAD} to {TOKENS}, and the two differ")
        converted["lm_head.decoder.weight"] = converted["roberta.embeddings.word_embeddings.weight"]
    return config, {key: converted[key] for key in expected}


def _complete(config: RobertaConfig, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a RobertaForMaskedLM's state_dict in float32 on the host, with both names of what is tied.

    Raises:
        InputError: config and state_dict disagree.
    """
    given = {key: value.detach().to("cpu", torch.float32) for key, value in state_dict.items()}
    if config.tie_word_embeddings:
        for one, other in (("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"), HEAD_BIASES):
            if one in given or other in given:  # safetensors files hold it once
                given[one], given[other] = given.get(one, given.get(other)), given.get(other, given.get(one))
                if not torch.equal(given[one], given[other]):
                    raise InputError(f"the model's config ties {one} and {other}, and the two differ: tie_weights()")
                given[other] = given[one]
    expected = _shapes(config)
    # Older files have a buffer of position numbers.
    wrong = sorted(expected.keys() ^ given.keys() - {"roberta.embeddings.position_ids"})
    wrong += [key for key in expected if key not in wrong and getattr(given[key], "shape", None) != expected[key]]
    if wrong:
        raise InputError(f"not a RobertaForMaskedLM of its config: {wrong[0]} and {len(wrong) - 1} more tensors differ")
    return given


def _settings(config: RobertaConfig) -> argparse.Namespace:
    """Returns fairseq's settings of a configuration."""
    positions = config.max_position_embeddings - OFFSET
    dropout = config.hidden_dropout_prob
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
        pooler_dropout=dropout if config.classifier_dropout is None else config.classifier_dropout,
        untie_weights_roberta=not config.tie_word_embeddings,
    )


def from_transformers(
    config: RobertaConfig, state_dict: Mapping[str, Tensor]
) -> tuple[argparse.Namespace, dict[str, Tensor]]:
    """Returns settings and state_dict (float32, on the host) of a RobertaModel of fairseq 0.12 that has the logits of a
    RobertaForMaskedLM.

    fairseq has no token types: the embedding of type 0, which every token of a RoBERTa has, is added to the positions.

    Args:
        state_dict: the model's; tied tensors may be there once.

    Raises:
        InputError: a model that fairseq's RoBERTa cannot be, or config and state_dict that disagree.
    """
    for key, value in {
        "model_type": "roberta",
        "hidden_act": "gelu",
        "layer_norm_eps": EPSILON,
        "pad_token_id": PAD,
        "is_decoder": False,
    }.items():
        if getattr(config, key) != value:
            raise InputError(f"the model's {key} is {getattr(config, key)!r}; fairseq's RoBERTa has {value!r} only")
    given = _complete(config, state_dict)
    weights = {
        f"{theirs}.{kind}": given[f"{ours}.{kind}"]
        for theirs, ours in _modules(config.num_hidden_layers).items()
        for kind in ("weight", "bias")
        if f"{ours}.{kind}" in given
    }
    weights[POSITIONS] = weights[POSITIONS].clone()
    weights[POSITIONS][OFFSET:] += given[TOKEN_TYPES][0]
    weights[f"{ENCODER}version"] = torch.tensor([3.0])  # as fairseq 0.12 writes it
    return _settings(config), weights


def write_checkpoint(args: argparse.Namespace, weights: Mapping[str, Tensor], updates: int = 0) -> bytes:
    """Returns the content of a file that fairseq 0.12 and `fairseq_files.read_checkpoint` load.

    Args:
        args, weights: as `from_transformers` returns them.
        updates: number of training steps, for information.
    """
    history = {"criterion_name": "MaskedLmLoss", "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}
    state = {"args": args, "cfg": None, "model": dict(weights), "task_state": {}}
    state["optimizer_history"] = [history | {"num_updates": updates}]
    state["extra_state"] = {"train_iterator": {"epoch": 1}}
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _byte_symbols() -> list[str]:
    """Returns the characters that stand for the 256 bytes, in the order of GPT-2's numbers (Radford et al. 2019,
    `encoder.py`): printable bytes as they are, the others as characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(256 - len(printable))]


def _read_text(path: Path, what: str) -> str:
    """Reads a UTF-8 file. Raises InputError where it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}); expected {what}") from error


def _read_symbols(path: Path) -> list[str]:
    """Returns the symbols of fairseq's dict.txt. Raises InputError naming the line."""
    symbols = []
    for number, line in enumerate(_read_text(path, "fairseq's dictionary").removesuffix("\n").split("\n"), start=1):
        symbol, space, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not space or not count.lstrip("-").isdecimal():
            raise InputError(f"{path} line {number} is {line[:60]!r}; expected a symbol, a space and its count")
        symbols.append(symbol)
    return symbols


def _read_bpe(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns the numbers of tokens, and the merges, in GPT-2's two files."""
    path = folder / "encoder.json"
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); expected GPT-2's encoder.json") from error
    if not isinstance(numbers, dict) or not all(isinstance(number, int) for number in numbers.values()):
        raise InputError(f"{path} does not map tokens to numbers; expected GPT-2's encoder.json")
    missing = [symbol for symbol in _byte_symbols() if symbol not in numbers]
    if missing:
        raise InputError(f"{path} has no token for {len(missing)} of the 256 bytes, {missing[0]!r} among them")
    path, merges = folder / "vocab.bpe", []
    lines = _read_text(path, "GPT-2's vocab.bpe").split("\n")
    for number, line in enumerate(lines[1:-1], start=2):  # the first says a version, the last is empty
        pair = tuple(line.split())
        if len(pair) != 2 or not {*pair, "".join(pair)} <= numbers.keys():
            raise InputError(f"{path} line {number} is {line[:60]!r}; expected two tokens whose union encoder.json has")
        merges.append(pair)
    return numbers, merges


def _read_tokenizer(folder: Path, positions: int) -> RobertaTokenizer:
    """Returns transformers' tokenizer with fairseq's ids."""
    numbers, merges = _read_bpe(folder)
    path = folder / "dict.txt"
    symbols = [*SPECIALS, *_read_symbols(path)]
    tokens = {str(number): token for token, number in numbers.items()}
    lost = tokens.keys() - set(symbols)
    if lost:
        # fairseq would read those as <unk>; transformers' BPE cannot.
        raise InputError(
            f"{path} lacks {len(lost)} of the {len(numbers)} tokens of encoder.json, {min(lost, key=int)} among them; "
            "expected all: give fairseq-preprocess a --srcdict that has them"
        )
    if MASK not in symbols:
        symbols = [*symbols, MASK]
    vocabulary: dict[str, int] = {}
    for line, symbol in enumerate(symbols, start=1 - len(SPECIALS)):
        token = symbol if symbol in (*SPECIALS, MASK) or FILLER.fullmatch(symbol) else tokens.get(symbol)
        if token is None:
            raise InputError(f"{path} line {line} has {symbol[:60]!r}; expected a number that encoder.json has")
        if token in vocabulary:
            raise InputError(f"{path} line {line} has {symbol[:60]!r}, a token that is there already: {token!r}")
        vocabulary[token] = line - 1 + len(SPECIALS)
    # A mask takes the space before it, as the word that it hides would have.
    mask = AddedToken(MASK, lstrip=True, special=True)
    return RobertaTokenizer(vocab=vocabulary, merges=merges, mask_token=mask, model_max_length=positions)


def read_folder(path: str | Path) -> tuple[RobertaConfig, Converted, RobertaTokenizer]:
    """Reads a RoBERTa of fairseq for transformers; returns (config, state_dict of RobertaForMaskedLM, tokenizer).

    The ids of text are those of fairseq's `RobertaHubInterface.encode`, with one difference: transformers takes special
    tokens that are written out in a text, such as "<mask>", for the special tokens.

    Args:
        path: folder with model.pt, dict.txt, encoder.json and vocab.bpe.

    Raises:
        InputError: a file is missing or of another kind; the dictionary does not fit; see also `to_transformers`.
    """
    folder = Path(path)
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        hint = f"; {BPE_FILES} has encoder.json and vocab.bpe" if {*missing} & {*FILES[2:]} else ""
        raise InputError(f"{folder} has no {' nor '.join(missing)}; expected a RoBERTa of fairseq{hint}")
    checkpoint = folder / "model.pt"
    settings, weights = fairseq_files.read_checkpoint(checkpoint.read_bytes(), str(checkpoint))
    config, state_dict = to_transformers(weights, settings, str(checkpoint))
    tokenizer = _read_tokenizer(folder, config.max_position_embeddings - OFFSET)
    if len(tokenizer) != config.vocab_size:
        raise InputError(
            f"{folder / 'dict.txt'} does not fit {checkpoint}: with the special symbols it has {len(tokenizer)}, and "
            f"the model {config.vocab_size}; expected the dictionary that the model was trained with"
        )
    converted = Converted(state_dict)
    converted.left_out = head_names(weights)
    return config, converted, tokenizer


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, words: int) -> None:
    """Raises InputError where fairseq's GPT-2 BPE cannot be the tokenizer of a model with so many tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {}
    splitter = rules.get("pre_tokenizer") or {}
    if (
        rules.get("model", {}).get("type") != "BPE"
        or rules.get("normalizer")
        or splitter.get("type") != "ByteLevel"
        or splitter.get("add_prefix_space")
        or not splitter.get("use_regex", True)
    ):
        raise InputError("the tokenizer is not GPT-2's byte-level BPE without add_prefix_space; fairseq knows that one")
    vocabulary = tokenizer.get_vocab()
    found = tuple(tokenizer.convert_ids_to_tokens([0, 1, 2, 3]))
    if found != SPECIALS or MASK not in vocabulary:
        raise InputError(f"the tokenizer begins with {' '.join(found)}; fairseq needs {' '.join(SPECIALS)}, and {MASK}")
    extra = set(tokenizer.get_added_vocab()) - {*SPECIALS, MASK}
    if extra:
        raise InputError(f"the tokenizer has {len(extra)} added tokens, {min(extra)!r} among them; fairseq knows none")
    if len(vocabulary) > words or max(vocabulary.values()) >= words:
        raise InputError(f"the tokenizer has {len(vocabulary)} tokens and the model {words}; expected those of one")


def _write_tokenizer(tokenizer: PreTrainedTokenizerBase, words: int) -> dict[str, bytes]:
    """Returns the content of dict.txt, encoder.json and vocab.bpe for a model with so many tokens."""
    _check_tokenizer(tokenizer, words)
    vocabulary = tokenizer.get_vocab()
    pairs = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in pairs]
    # GPT-2's numbers: bytes, then what the merges make, then the rest (<|endoftext|>).
    own = {*SPECIALS, MASK} | {token for token in vocabulary if FILLER.fullmatch(token)}
    order = dict.fromkeys([*_byte_symbols(), *(left + right for left, right in merges)])
    order |= dict.fromkeys(sorted(vocabulary.keys() - own - order.keys(), key=vocabulary.get))
    missing = [token for token in order if token not in vocabulary]
    if missing:
        raise InputError(f"the tokenizer has no id for {len(missing)} tokens of its BPE, {missing[0]!r} among them")
    numbers = {token: number for number, token in enumerate(order)}

    # Ids without a token become fillers: models are padded to round sizes.
    symbols = {place: token if token in own else str(numbers[token]) for token, place in vocabulary.items()}
    taken = iter(f"madeupword{number:04d}" for number in range(10**6) if f"madeupword{number:04d}" not in own)
    listed = [symbols[place] if place in symbols else next(taken) for place in range(words)]
    if listed[-1] == MASK:  # fairseq's task appends it
        listed.pop()
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    return {
        # fairseq needs a count for each symbol; it is not known.
        "dict.txt": "".join(f"{symbol} 0\n" for symbol in listed[len(SPECIALS) :]).encode(),
        "encoder.json": json.dumps(numbers).encode(),
        "vocab.bpe": "\n".join(lines).encode(),
    }


def write_folder(
    path: str | Path, config: RobertaConfig, state_dict: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Writes a RobertaForMaskedLM and its tokenizer as a folder that fairseq 0.12 loads:

        RobertaModel.from_pretrained(path, gpt2_encoder_json=f"{path}/encoder.json", gpt2_vocab_bpe=f"{path}/vocab.bpe")

    Args:
        path: folder, which is created; files of the same names are replaced.
        tokenizer: byte-level BPE with <s> 0, <pad> 1, </s> 2, <unk> 3 and <mask>.

    Raises:
        InputError: fairseq's GPT-2 BPE cannot be the tokenizer, or it is another model's; see also `from_transformers`.
    """
    args, weights = from_transformers(config, state_dict)
    files = _write_tokenizer(tokenizer, config.vocab_size) | {"model.pt": write_checkpoint(args, weights)}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
