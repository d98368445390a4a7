"""transformers' encoders with the layers that the TPU's compiler rewards: the same classes, parameters and keys.

    model = fast_layers(BertForSequenceClassification.from_pretrained(checkpoint))

Nothing of transformers is patched. Attention is registered under its own name through transformers' interface, and
submodules are replaced by subclasses that hold the very same parameters, so that `save_pretrained` and `state_dict`
stay the same. models/layers.py says what each form is worth.
"""

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
    XLNetConfig,
)
from transformers.activations import GELUActivation
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention
from transformers.utils import ModelOutput, logging

import optional
from errors import InputError
from models import architectures, heads, layers
from models.architectures import positions

ATTENTION = "einsum"  # its name among transformers' attention implementations
Weights = dict[str, Tensor] | None  # of a checkpoint, by name; None: transformers reads them itself
# Whose heads have the names of a classifier's, and no use for one.
OTHER_JOBS = ("ForTokenClassification", "ForMultipleChoice", "ForEntityClassification")
# A model may have this many tokens more than its tokenizer, for the hardware's sake, or this share of its own: mDeBERTa
# has 251,000 and a tokenizer of 250,102.
PADDED_VOCABULARY, PADDED_SHARE = 128, 0.005


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more,
) -> tuple[Tensor, None]:
    """Computes attention with the signature of transformers' AttentionInterface.

    Args:
        query: [B, H, T, D].
        key, value: the same, or with fewer heads, each of which serves several queries' (Ainslie et al. 2023).
        attention_mask: as `additive_mask` returns it.
        more: what else the model gives, see `architectures.refuse_more`.

    Returns:
        [B, T, H, D], and None for the weights, which are not kept.
    """
    architectures.refuse_more(module, more)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if key.shape[1] != query.shape[1]:
        share = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    query, key, value = query.transpose(1, 2) * scaling, key.transpose(1, 2), value.transpose(1, 2)
    return layers.attention(query, key, value, attention_mask, dropout), None


def additive_mask(
    batch_size: int, kv_length: int, attention_mask: Tensor | None, device: torch.device, mask_function, **more
) -> Tensor:
    """Returns what is added to the scores, float32 [B, 1, 1, T]: 0 where attention_mask [B, T] is true, else MASKED;
    or [B, 1, T, T] where a token sees some of the others only, such as those of a window.

    transformers' own mask function reads the mask from the device in the middle of the step, to leave it out where all
    values are true.
    """
    if mask_function is not bidirectional_mask_function:
        seen = sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            attention_mask=attention_mask,
            device=device,
            mask_function=mask_function,
            **more | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )
        return torch.where(seen, 0.0, layers.MASKED)
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    return torch.where(attention_mask, 0.0, layers.MASKED)[:, None, None, :]


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, additive_mask)

# x * Phi(x) is x * (1 + tanh(x * P(x^2))) / 2 for these coefficients of P within 3.4e-6 (a minimax fit): less than half
# of bfloat16's rounding wherever the result is above 1e-3 in magnitude.
GELU_TERMS = (7.97828e-1, 3.64688e-2, -1.24862e-4, -3.0581e-5, 1.11908e-6)


class FittedGELU(torch.autograd.Function):
    """GELU by the hardware's tanh, for bfloat16; keeps its input."""

    @staticmethod
    def distribution(x: Tensor) -> Tensor:
        """Returns the normal distribution's Phi(x), within 7e-6, for float32 x."""
        square, exponent = x.square(), GELU_TERMS[-1]
        for term in GELU_TERMS[-2::-1]:
            exponent = exponent * square + term
        return 0.5 + 0.5 * torch.tanh(x * exponent)

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * FittedGELU.distribution(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        wide = ctx.saved_tensors[0].float()
        density = (2 * math.pi) ** -0.5 * torch.exp(-0.5 * wide.square())
        return (gradient.float() * (FittedGELU.distribution(wide) + wide * density)).to(gradient.dtype)


class GELU(nn.Module):
    """x * Phi(x) (Hendrycks and Gimpel 2016); for bfloat16 on devices for which a program is compiled by `FittedGELU`.

    The compiler computes an activation again in each product that takes it, and erf is some 40 operations. BERT-base on
    GLUE: 98.1 -> 86.3 million bundles of code (docs/compile.md), 123.9 -> 122.8 million cycles.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type in layers.NATIVE_DEVICES or x.dtype != torch.bfloat16:
            return F.gelu(x)
        return FittedGELU.apply(x)


class FewRows(nn.Embedding):
    """An embedding of one or two rows, which a compiled program chooses by comparison: its gradient is two sums, where
    that of a lookup adds token after token. BERT-base on GLUE: 1.05 -> 0.73 million bundles without an estimate."""

    def forward(self, ids: Tensor) -> Tensor:
        if ids.device.type in layers.NATIVE_DEVICES or len(self.weight) > 2:  # which may have grown
            return super().forward(ids)
        return torch.where((ids == 0)[..., None], self.weight[0], self.weight[-1])


# The encoders that may have `ShortRows`. Others give their layers more than a mask: languages, rotated positions.
PACKED = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")


class ShortRows:
    """The layers of an encoder, on packed rows of up to 128 tokens where those of the batch are short, for TPUs.

    BERT-base on GLUE, 256 rows of 64 tokens: 178.9 -> 115.7 million cycles. On a CPU it is slower.
    """

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **options) -> ModelOutput:
        """Returns what the layers do for hidden_states [B, T, C] and a mask as `additive_mask` returns it."""
        shape = hidden_states.shape
        together = layers.rows_together(*shape[:2], self.parts)
        if together > 1:
            row = torch.arange(together, device=hidden_states.device).repeat_interleave(shape[1])
            others = torch.where(row == row[:, None], 0.0, 2 * layers.MASKED)  # a row without any key stays alone, too
            attention_mask = attention_mask.reshape(-1, 1, 1, len(row)) + others
            hidden_states = hidden_states.reshape(-1, len(row), shape[2])
        found = super().forward(hidden_states, attention_mask, **options)
        found.last_hidden_state = found.last_hidden_state.view(shape)
        return found


class WideAttention(DisentangledSelfAttention):
    """DeBERTa's attention in float32. Its scores in bfloat16 would be filled with float32's lowest number, which is
    -inf there, and the rows of padding, which see nothing, would be NaN."""

    def forward(self, hidden_states: Tensor, *args, **options) -> tuple[Tensor, Tensor | None]:
        """Returns what transformers' own does, in the type of hidden_states [B, T, C]."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            mixed, weights = super().forward(hidden_states.float(), *args, **options)
        return mixed.to(hidden_states.dtype), weights


REPLACED = {nn.Dropout: layers.Dropout, nn.Linear: layers.Linear, nn.LayerNorm: layers.LayerNorm, GELUActivation: GELU}
REPLACED |= {DisentangledSelfAttention: WideAttention}


def fast_layers(model: PreTrainedModel, parts: int = 0) -> PreTrainedModel:
    """Replaces the layers of an encoder by those of models/layers.py, which share its parameters; returns the model.

    Attention is replaced in encoders that go through transformers' AttentionInterface (BERT, RoBERTa, DistilBERT,
    ELECTRA, ModernBERT, …) and in XLNet. Any other encoder keeps its attention, with a mask that needs no reading.
    Those of PACKED get `ShortRows`, if `parts` is a multiple of the devices that share a batch: each part packs rows of
    its own.
    """
    xlnet = model.config.model_type == "xlnet"
    replaced = REPLACED | optional.load("xlnet").replaced(model.config) if xlnet else REPLACED
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            few = type(child) is nn.Embedding and len(child.weight) <= 2 and child.padding_idx is None
            if isinstance(child, nn.LayerNorm) and len(child.normalized_shape) > 1:
                continue  # ours is over the last dimension
            if few or type(child) in replaced:
                layer = nn.Module.__new__(FewRows if few else replaced[type(child)])
                layer.__dict__ = dict(child.__dict__)
                setattr(parent, name, layer)
    if model._supports_attention_backend:
        model.set_attn_implementation(ATTENTION)
    elif not xlnet:
        architectures.use_own_attention(model)
    if parts and model.config.model_type in PACKED:
        encoder = getattr(model.base_model, "transformer" if model.config.model_type == "distilbert" else "encoder")
        if not isinstance(encoder, ShortRows):
            encoder.__class__ = type("ShortRows", (ShortRows, type(encoder)), {})
        encoder.parts = parts
    return model


# Layers, width and heads; a feed-forward layer has four times the width.
SIZES = {"tiny": (2, 64, 2), "mini": (4, 256, 4), "base": (12, 768, 12), "large": (24, 1024, 16)}
SIZES["1.3b"] = (24, 2048, 32)  # Shoeybi et al. 2019, table 4


def configuration(kind: str, size: str, tokenizer, max_tokens: int) -> PreTrainedConfig:
    """Returns the configuration of a new encoder, as the published models of its kind have it.

    Args:
        kind: bert (Devlin et al. 2019), distilbert (Sanh et al. 2019: half the layers), roberta (Liu et al. 2019) or
            xlnet (Yang et al. 2019).
        size: a key of SIZES.
        tokenizer: a tokenizer of transformers; gives the size of the vocabulary and the special tokens.
        max_tokens: longest sequence; XLNet's positions are relative and have no end.
    """
    depth, width, heads = SIZES[size]
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if kind in ("roberta", "xlnet"):
        words |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": heads}
    sizes |= {"intermediate_size": 4 * width, "max_position_embeddings": max_tokens}
    if kind == "bert":
        return BertConfig(**words, **sizes)
    if kind == "roberta":
        sizes["max_position_embeddings"] += tokenizer.pad_token_id + 1  # positions start after the padding token's id
        return RobertaConfig(**words, **sizes, type_vocab_size=1, layer_norm_eps=1e-5)
    if kind == "distilbert":
        sizes = {"n_layers": depth // 2, "dim": width, "n_heads": heads, "hidden_dim": 4 * width}
        return DistilBertConfig(**words, **sizes, max_position_embeddings=max_tokens)
    if kind == "xlnet":
        return XLNetConfig(**words, n_layer=depth, d_model=width, n_head=heads, d_inner=4 * width)
    raise ValueError(f"kind is {kind!r}; it must be bert, distilbert, roberta or xlnet")


def open_checkpoint(
    folder: str, model: str, compiled: bool = True
) -> tuple[PreTrainedConfig, Weights, PreTrainedTokenizerBase]:
    """Opens a hub id or local folder; returns its configuration, its weights if they had to be converted, and its
    tokenizer.

    Args:
        model: the architecture that it must have, or "auto" for any; "fairseq-roberta": fairseq's, with model.pt.
        compiled: whether it is for a device for which a program is compiled, see `architectures.check`.

    Raises:
        InputError: it cannot be read, is another architecture or one that does not run here, or has another model's
            tokenizer.
    """
    if model == "fairseq-roberta":
        config, weights, tokenizer = optional.load(model).read_folder(folder)
    else:
        weights = None
        try:
            if folder.startswith(("/", ".")) and not os.path.isdir(folder):
                raise OSError("there is no such folder; give one, or a hub id")
            config = AutoConfig.from_pretrained(folder)
            if model not in (config.model_type, "auto"):
                raise InputError(f"checkpoint {folder} is a {config.model_type}, not a {model}")
            architectures.check(folder, config, compiled)
            if config.model_type == "xlnet":
                optional.load("xlnet").replaced(config)  # refuses other distances than the published ones'
            tokenizer = _tokenizer(folder)
        except InputError:  # which is a ValueError
            raise
        except (OSError, ValueError) as error:
            raise InputError(f"checkpoint {folder} cannot be read: {str(error).splitlines()[0]}") from error
    words = getattr(config.get_text_config(), "vocab_size", None)  # CANINE hashes characters, and has none
    if words is not None and not 0 <= words - len(tokenizer) < max(PADDED_VOCABULARY, PADDED_SHARE * words):
        both = f"a model of {words} tokens and a tokenizer of {len(tokenizer)}"
        raise InputError(f"checkpoint {folder} has {both}; they do not belong together")
    return config, weights, tokenizer


def _tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a checkpoint; raises OSError or ValueError where it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        raise
    except Exception as error:  # a tokenizer without its files raises TypeError and more
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"its tokenizer is not there, or not whole ({said})") from error


@dataclass(frozen=True)
class Classifier:
    """A model that classifies sequences, and what became of the head of its checkpoint."""

    model: PreTrainedModel
    head: heads.Order


def load(auto_class, config: PreTrainedConfig, weights: Weights, folder: str) -> PreTrainedModel:
    """Returns a float32 model of one of transformers' auto classes with a checkpoint's encoder.

    The head is new where the checkpoint has none, or has one for another number of labels.

    Raises:
        InputError: the checkpoint lacks weights of the encoder, which would stay random without a word, or has them in
            other shapes.
    """
    return _load(auto_class, config, weights, folder)[0]


def _load(auto_class, config: PreTrainedConfig, weights: Weights, folder: str) -> tuple[PreTrainedModel, dict]:
    """Returns what `load` does, and transformers' report: missing_keys, mismatched_keys …"""
    options = {"config": config, "dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        if weights is None:
            model, report = auto_class.from_pretrained(folder, **options)
        else:
            model_class = auto_class._model_mapping[type(config)]
            model, report = model_class.from_pretrained(None, state_dict=weights, **options)
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise InputError(f"checkpoint {folder} cannot be read: {str(error).splitlines()[0]}") from error
    body = f"{model.base_model_prefix}."
    missing = [name for name in report["missing_keys"] if name.startswith(body) and "pooler" not in name]
    if missing:
        raise InputError(f"checkpoint {folder} lacks {len(missing)} weights of its encoder, such as {missing[0]}")
    misshapen = [name for name, *_ in report["mismatched_keys"] if name.startswith(body)]
    if misshapen:
        raise InputError(f"checkpoint {folder} has {misshapen[0]} in another shape than its configuration says")
    return model, report


def classifier(
    settings: PreTrainedConfig,
    labels: Sequence[str],
    source: tuple[str, Weights] | None,
    stated: Sequence[str] = (),
) -> Classifier:
    """Returns a model that classifies sequences by these labels, or gives one number where there are none.

    Its head is new, and so is its encoder, unless `source` gives the (folder, weights) of `load`. A checkpoint's head
    is kept where its classes have the names of the labels: its rows are put into the order of these.

    Args:
        stated: the labels in the order of the checkpoint's rows, which counts before its own names.

    Raises:
        InputError: as `load`; the order is stated of a head that is not there; the checkpoint's names contradict
            themselves.
    """
    theirs = copy.deepcopy(settings)
    made_for = settings.architectures or []
    settings.num_labels = max(len(labels), 1)
    settings.problem_type = "single_label_classification" if labels else "regression"
    if labels:
        settings.id2label, settings.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
    if source is None:
        model = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
        return Classifier(model, heads.Order())

    folder, weights = source
    where = f"checkpoint {folder}"
    model, report = _load(AutoModelForSequenceClassification, settings, weights, folder)
    rows = _label_rows(model)
    found = {name: shape for name, shape, *_ in report["mismatched_keys"] if name in rows}
    loaded = not found and not rows.keys() & set(report["missing_keys"])
    if left_out := getattr(weights, "left_out", ()):
        head = heads.other(where, f"classification heads of fairseq, which are left out: {', '.join(left_out)}")
    elif rows.keys() & set(report["missing_keys"]):
        head = heads.Order(None, f"{heads.NEW}{where} has none")
    elif found:
        name, shape = next(iter(found.items()))
        head = heads.other(where, f"one of {shape[rows[name]]} outputs, and {settings.num_labels} are needed")
    elif (job := [name for name in made_for if name.endswith(OTHER_JOBS)]) and not stated:
        head = heads.other(where, f"the head of a {job[0]}")
    elif below := sorted(set(report["missing_keys"]) - rows.keys()):  # what its last layer was trained on
        head = heads.other(where, f"a head that lacks {len(below)} weights, such as {below[0]}")
    elif labels:
        head = heads.order(where, _names(theirs, where, stated), labels, stated)
    elif theirs.problem_type in (None, "regression"):
        head = heads.Order([0])
    else:
        head = heads.other(where, f"a head of one class, {theirs.id2label[0]}")
    if stated and head.rows is None:
        raise InputError(f"--labels states the order of a head's classes, but {head.said.removeprefix(heads.NEW)}")
    if loaded:
        _arrange(model, rows, head)
    return Classifier(model, head)


def _label_rows(model: PreTrainedModel) -> dict[str, int]:
    """Returns the parameters of a classifier that have a row for each label, by whatever name: those that would be
    larger with one label more. The value is the dimension that has the rows."""
    settings = copy.deepcopy(model.config)
    settings.num_labels += 1
    with torch.device("meta"):
        larger = type(model)(settings)
    rows = {}
    for name, parameter in model.named_parameters():
        for dim, (own, other) in enumerate(zip(parameter.shape, larger.get_parameter(name).shape, strict=True)):
            if own != other:
                rows[name] = dim
    return rows


def _names(settings: PreTrainedConfig, where: str, stated: Sequence[str]) -> list[str] | None:
    """Returns the names that a configuration gives the rows of its head; None where it does not number them from 0.

    Where id2label has placeholders only, which transformers fills in for one that is not there, label2id has the names.

    Raises:
        InputError: id2label and label2id put the same names into different orders, and nothing is stated.
    """
    back = {str(number): name for name, number in (settings.label2id or {}).items()}  # some files have "0" for 0
    names, others = _numbered(settings.id2label), _numbered({int(n): back[n] for n in back if n.isdecimal()})
    if others and not heads.unnamed(others) and (names is None or heads.unnamed(names)):
        return others
    if names and others and not stated:
        rows = heads.match(others, names)
        if rows is not None and rows != list(range(len(names))):
            both = f"{where} has the classes {heads.listed(names)} by its id2label, and others by its label2id"
            raise InputError(f"{both}; state their order in --labels, or correct its config.json")
    return names


def _numbered(names: dict[int, str]) -> list[str] | None:
    """Returns the names of 0, 1, …; None where these are not the numbers."""
    numbers = range(len(names))
    return [names[number] for number in numbers] if set(names) == set(numbers) else None


def _arrange(model: PreTrainedModel, rows: dict[str, int], head: heads.Order) -> None:
    """Puts the rows of a loaded head into another order, or makes its last layer new, as `head` says."""
    with torch.no_grad():
        for name, dim in rows.items():
            parameter = model.get_parameter(name)
            if head.moved:
                parameter.copy_(parameter.index_select(dim, torch.tensor(head.rows)))
            elif head.rows is None:
                parameter._is_hf_initialized = False  # else transformers leaves it as it is
                parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.zero_()
        if head.rows is None:
            for module in dict.fromkeys(name.rpartition(".")[0] for name in rows):
                model._init_weights(model.get_submodule(module))


def logits(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Returns a classifier's logits [B, labels] for "input_ids", "attention_mask" and "token_type_ids" [B, T]."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if architectures.takes_types(model):
        inputs["token_type_ids"] = batch["token_type_ids"]
    if model.config.model_type == "xlnet":
        inputs["use_mems"] = False
    return model(**inputs).logits


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns each example's cross-entropy, or the squared error of one output: float32 [B] of logits [B, labels]."""
    if logits.shape[1] == 1:
        return (logits[:, 0].float() - labels).square()
    return F.cross_entropy(logits.float(), labels.long(), reduction="none")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Returns an optimizer's two groups: biases and norms do not decay, as in the code of all four papers. A norm is
    one by its type or by its name."""
    norms = set()
    for module in model.modules():
        if architectures.is_norm(module):
            norms.update(id(parameter) for parameter in module.parameters(recurse=False))
    groups = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        named = "bias" in name or "layernorm" in name.lower().replace("_", "")
        exempt = named or id(parameter) in norms
        groups[exempt]["params"].append(parameter)
    return groups


def save(
    folder: str, model: PreTrainedModel, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, fairseq=False
) -> None:
    """Writes the folder that `from_pretrained` and `pipeline` of transformers load.

    Args:
        folder: local.
        weights: the model's state_dict on the host.
        fairseq: also writes what fairseq loads, into the folder fairseq.
    """
    logging.disable_progress_bar()
    settings = copy.deepcopy(model.config)
    settings._attn_implementation = None  # ours has a name that only this program knows
    with torch.device("meta"):  # so that nothing is held twice
        on_host = type(model)(settings)
    on_host.load_state_dict(weights, assign=True)
    on_host.tie_weights()
    on_host.save_pretrained(folder)
    tokenizer, longest = copy.deepcopy(tokenizer), positions(model)
    if longest < math.inf:  # else the model has no end, and the tokenizer's own says what it was made for
        tokenizer.model_max_length = longest
    if tokenizer.is_fast:  # its file would have the --lengths of this run, and cut what others read with it
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)
    if fairseq:
        optional.load("fairseq-roberta").write_folder(f"{folder}/fairseq", model.config, weights, tokenizer)
