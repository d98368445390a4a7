"""transformers' encoders with the layers that the TPU's compiler rewards: the same classes, parameters and keys.

    model = fast_layers(BertForSequenceClassification.from_pretrained(checkpoint))

Nothing of transformers is patched: attention is registered under a name of its own, as transformers' interface is meant
to be used, and submodules are replaced by subclasses that hold the very same parameters. A model's
`save_pretrained` and `state_dict` are what they were. What the forms are worth: models/layers.py.
"""

import math

import safetensors
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
    XLNetConfig,
)
from transformers.masking_utils import bidirectional_mask_function
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention
from transformers.utils import logging

from errors import InputError
from models import fairseq_roberta, layers

ATTENTION = "einsum"  # its name among transformers' attention implementations
PADDED_VOCABULARY = 128  # models have at most this many tokens more than their tokenizers, for the hardware's sake


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_,
) -> tuple[Tensor, None]:
    """Attention as transformers' AttentionInterface has it: q, k and v [B, H, T, D]; returns [B, T, H, D].

    `attention_mask` is `additive_mask`'s.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = query.transpose(1, 2) * scaling, key.transpose(1, 2), value.transpose(1, 2)
    return layers.attention(query, key, value, attention_mask, dropout), None


def additive_mask(
    batch_size: int, kv_length: int, attention_mask: Tensor | None, device: torch.device, mask_function, **_
) -> Tensor:
    """What is added to the scores, float32 [B, 1, 1, T]: 0 where attention_mask [B, T] is true, else MASKED.

    transformers' own looks at the mask's values to leave it out where all are true: a read from the device in the
    middle of the step.
    """
    if mask_function is not bidirectional_mask_function:
        raise ValueError(f"{ATTENTION} attention is for encoders: every token sees all that is no padding")
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    return torch.where(attention_mask, 0.0, layers.MASKED)[:, None, None, :]


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, additive_mask)


QUERIES = 128  # of a block whose scores are shifted at once


def position_scores(q: Tensor, r: Tensor) -> Tensor:
    """Products of queries [Tq, B, N, D] with keys of distances [Tq + T, B, N, D], which are Tq, Tq - 1, …, 1 - T;
    [B, N, Tq, T], for query i and key j that of the distance i - j.

    A query's scores are shifted by its place: without the first of all numbers of a block, and with rows that are one
    shorter, they stand below each other (Dai et al. 2019, appendix B). On all queries at once that is two copies of
    [Tq, Tq + T]; a block needs only the distances that occur in it: of XLNet's attention, 512 tokens, 39.2 -> 26.5
    million cycles.
    """
    queries, distances, parts = q.shape[0], r.shape[0], []
    for first in range(0, queries, QUERIES):
        last = min(first + QUERIES, queries)
        x = torch.einsum("ibnd,jbnd->bnij", q[first:last], r[queries - last : distances - first])
        rows, columns = x.shape[2:]
        x = x.flatten(2)[..., rows:].reshape(*x.shape[:2], rows, columns - 1)
        parts.append(x[..., : distances - queries])
    return torch.cat(parts, 2)


class RelativeAttention(XLNetRelativeAttention):
    """XLNet's two-stream attention with relative positions (Yang et al. 2019, sections 2.3 and A.2).

    Activations are time-major as in transformers: h [T, B, H], masks [T, T, B, 1], r [2T, B, H].
    """

    def _to_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.to(layers.compute_dtype(x))
        return torch.einsum("ibh,hnd->ibnd", x, weight.to(x.dtype))

    def rel_attn_core(
        self, q_head, k_head_h, v_head_h, k_head_r, seg_mat=None, attn_mask=None, output_attentions=False
    ):
        """q [Tq, B, N, D], keys and values [T, B, N, D], positions' keys [2T, B, N, D]: [Tq, B, N, D]."""
        if output_attentions:
            raise NotImplementedError("attention weights are not kept; leave output_attentions off")
        dtype = q_head.dtype

        def biased(bias: Tensor) -> Tensor:
            return (q_head + bias.to(dtype)) * self.scale

        scores = torch.einsum("ibnd,jbnd->bnij", biased(self.r_w_bias), k_head_h)
        scores = scores + position_scores(biased(self.r_r_bias), k_head_r)
        if seg_mat is not None:
            # [B, N, Tq, 2] for the same segment, and for another; which of them counts is seg_mat[..., 1].
            segments = torch.einsum("ibnd,snd->bnis", biased(self.r_s_bias), self.seg_embed.to(dtype))
            other = seg_mat[..., 1].permute(2, 0, 1)[:, None].to(dtype)
            scores = scores + segments[..., :1] + other * (segments[..., 1:] - segments[..., :1])
        mask = torch.zeros((), device=q_head.device)
        if attn_mask is not None:
            mask = attn_mask.permute(2, 3, 0, 1).to(torch.float32) * layers.MASKED
        dropout = self.dropout.p if self.training else 0.0
        values = v_head_h.transpose(0, 1)
        return layers.AttentionCore.apply(scores, values, mask, dropout).transpose(0, 1)

    def post_attention(self, h, attn_vec, residual=True):
        """Back to [T, B, H], with residual and norm."""
        mixed = self.dropout(torch.einsum("ibnd,hnd->ibh", attn_vec, self.o.to(attn_vec.dtype)))
        return self.layer_norm(mixed + h.to(mixed.dtype) if residual else mixed)

    def forward(
        self, h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems=None, target_mapping=None, output_attentions=False
    ):
        """(h, g) after attention, in the content stream and, where there is one, in the query stream [P, B, H]."""
        if mems is not None:
            raise NotImplementedError("memories of earlier segments are not kept; leave use_mems off")
        keys, values = self._to_heads(h, self.k), self._to_heads(h, self.v)
        context = {"k_head_r": self._to_heads(r, self.r), "seg_mat": seg_mat, "output_attentions": output_attentions}
        mixed = self.rel_attn_core(self._to_heads(h, self.q), keys, values, attn_mask=attn_mask_h, **context)
        output_h, output_g = self.post_attention(h, mixed), None
        if g is not None:
            queries = self._to_heads(g, self.q)
            if target_mapping is not None:
                mapping = target_mapping.to(queries.dtype)
                queries = torch.einsum("mbnd,mlb->lbnd", queries, mapping)
            mixed = self.rel_attn_core(queries, keys, values, attn_mask=attn_mask_g, **context)
            if target_mapping is not None:
                mixed = torch.einsum("lbnd,mlb->mbnd", mixed, mapping)
            output_g = self.post_attention(g, mixed)
        return output_h, output_g


REPLACED = {
    nn.Dropout: layers.Dropout,
    nn.Linear: layers.Linear,
    nn.LayerNorm: layers.LayerNorm,
    XLNetRelativeAttention: RelativeAttention,
}


def fast_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Replaces the layers of an encoder by those of models/layers.py, which share its parameters; returns it.

    An encoder whose attention goes through transformers' AttentionInterface (BERT, RoBERTa, DistilBERT, ELECTRA, …)
    gets ours, and so does XLNet; any other keeps the attention that it has.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) in REPLACED:
                layer = nn.Module.__new__(REPLACED[type(child)])
                layer.__dict__ = dict(child.__dict__)
                setattr(parent, name, layer)
    if model._supports_attention_backend:
        model.set_attn_implementation(ATTENTION)
    return model


# Layers, width and heads; a feed-forward layer is four widths.
SIZES = {"tiny": (2, 64, 2), "mini": (4, 256, 4), "base": (12, 768, 12), "large": (24, 1024, 16)}


def configuration(kind: str, size: str, tokenizer, max_tokens: int) -> PreTrainedConfig:
    """The configuration of a new encoder, as the published models of its kind have it.

    Args:
        kind: bert (Devlin et al. 2019), distilbert (Sanh et al. 2019: half the layers), roberta (Liu et al. 2019) or
            xlnet (Yang et al. 2019).
        size: of SIZES.
        tokenizer: of transformers; gives the size of the vocabulary and the special tokens.
        max_tokens: of a sequence; XLNet's positions are relative and have no end.
    """
    depth, width, heads = SIZES[size]
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if kind == "bert":
        sizes = {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": heads}
        return BertConfig(**words, **sizes, intermediate_size=4 * width, max_position_embeddings=max_tokens)
    if kind == "distilbert":
        sizes = {"n_layers": depth // 2, "dim": width, "n_heads": heads, "hidden_dim": 4 * width}
        return DistilBertConfig(**words, **sizes, max_position_embeddings=max_tokens)
    if kind == "roberta":
        sizes = {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": heads}
        sizes |= {"intermediate_size": 4 * width, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
        # Its positions are counted from the padding token's id on.
        words |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        return RobertaConfig(**words, **sizes, max_position_embeddings=max_tokens + tokenizer.pad_token_id + 1)
    if kind == "xlnet":
        sizes = {"n_layer": depth, "d_model": width, "n_head": heads, "d_inner": 4 * width}
        words |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        return XLNetConfig(**words, **sizes)
    raise ValueError(f"kind is {kind!r}; it must be bert, distilbert, roberta or xlnet")


def open_checkpoint(
    folder: str, model: str
) -> tuple[PreTrainedConfig, dict[str, Tensor] | None, PreTrainedTokenizerBase]:
    """(configuration, weights if they had to be converted, tokenizer) of a hub id or local folder.

    Args:
        model: the architecture that it must have, by transformers' name; "auto": any; "fairseq-roberta": the folder is
            fairseq's, with model.pt.
    Raises:
        InputError: it cannot be read, is another architecture, or its tokenizer is of another model.
    """
    if model == "fairseq-roberta":
        config, weights, tokenizer = fairseq_roberta.read_folder(folder)
    else:
        weights = None
        try:
            config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise InputError(f"checkpoint {folder} cannot be read: {str(error).splitlines()[0]}") from error
        if model not in (config.model_type, "auto"):
            raise InputError(f"checkpoint {folder} is a {config.model_type}, not a {model}")
    if not 0 <= config.vocab_size - len(tokenizer) < PADDED_VOCABULARY:
        raise InputError(
            f"checkpoint {folder} has a model of {config.vocab_size} tokens and a tokenizer of {len(tokenizer)}; they "
            "do not belong together"
        )
    return config, weights, tokenizer


def load(auto_class, config: PreTrainedConfig, weights: dict[str, Tensor] | None, folder: str) -> PreTrainedModel:
    """A model of one of transformers' auto classes with a checkpoint's encoder, float32. Its head is new where the
    checkpoint has none, or one for another number of labels.

    Args:
        weights: what `open_checkpoint` returned; None: they are read from `folder`.
    Raises:
        InputError: the checkpoint lacks weights of the encoder, which would stay at random without a word, or has them
            in other shapes.
    """
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
    return model


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """For an optimizer: no decay of biases and norms, as all four papers' code has it."""
    groups = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        exempt = "bias" in name or "layernorm" in name.lower().replace("_", "")
        groups[exempt]["params"].append(parameter)
    return groups


def positions(config: PreTrainedConfig) -> float:
    """Most tokens of a sequence; infinite where positions are relative."""
    if config.model_type == "xlnet":
        return math.inf
    offset = config.pad_token_id + 1 if config.model_type in ("roberta", "camembert", "xlm-roberta") else 0
    return config.max_position_embeddings - offset


def predict(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits [B, P, words] of a BERT's, RoBERTa's or DistilBERT's language-model head for some places only, [B, P, H].

    transformers' own forward pass has the head on all T places: of BERT-base's step with 79 predicted places of 512
    that is 50 of 264 million cycles on one v5e chip (libtpu 0.0.51's estimate).
    """
    if model.config.model_type == "bert":
        return model.cls.predictions(hidden)
    if model.config.model_type == "roberta":
        return model.lm_head(hidden)
    if model.config.model_type == "distilbert":
        transformed = model.vocab_layer_norm(model.activation(model.vocab_transform(hidden)))
        return model.vocab_projector(transformed)
    raise ValueError(f"the language-model head of a {model.config.model_type} is not known; add it here")


def begin_with_layers(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Gives a DistilBERT for masked words the weights of a BERT: all but the layers, of which it takes every n-th
    (0, 2, 4, … as Sanh et al. 2019, section 3, say; their script takes 0, 2, 4, 7, 9 and 11 of 12). The teacher may
    have more positions."""
    layer_names = {
        "attention.self.query": "attention.q_lin",
        "attention.self.key": "attention.k_lin",
        "attention.self.value": "attention.v_lin",
        "attention.output.dense": "attention.out_lin",
        "attention.output.LayerNorm": "sa_layer_norm",
        "intermediate.dense": "ffn.lin1",
        "output.dense": "ffn.lin2",
        "output.LayerNorm": "output_layer_norm",
    }
    names = {
        "bert.embeddings.word_embeddings": "distilbert.embeddings.word_embeddings",
        "bert.embeddings.position_embeddings": "distilbert.embeddings.position_embeddings",
        "bert.embeddings.LayerNorm": "distilbert.embeddings.LayerNorm",
        "cls.predictions.transform.dense": "vocab_transform",
        "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
        "cls.predictions.decoder": "vocab_projector",
    }
    every = teacher.config.num_hidden_layers // student.config.n_layers
    for i in range(student.config.n_layers):
        for theirs, ours in layer_names.items():
            names[f"bert.encoder.layer.{i * every}.{theirs}"] = f"distilbert.transformer.layer.{i}.{ours}"
    teachers = teacher.state_dict()
    weights = {
        f"{ours}.{kind}": teachers[f"{theirs}.{kind}"]
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
        if f"{theirs}.{kind}" in teachers
    }
    places = "distilbert.embeddings.position_embeddings.weight"
    weights[places] = weights[places][: positions(student.config)]
    student.load_state_dict(weights, strict=True)


def open_teacher(
    folder: str, student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: str, initialise: bool
) -> PreTrainedModel:
    """A BERT for masked words, for a DistilBERT to learn from.

    Args:
        tokenizer, data: what the data was made with, and its name.
        initialise: the student begins with its layers, see `begin_with_layers`.
    """
    config, _, own = open_checkpoint(folder, "bert")
    same_vocabulary(folder, own, tokenizer, data)
    if config.hidden_size != student.config.dim:
        raise InputError(
            f"teacher {folder} has a width of {config.hidden_size}, its student one of {student.config.dim}"
        )
    sizes = {
        "positions": (positions(config), positions(student.config)),
        "layers": (config.num_hidden_layers, student.config.n_layers),
    }
    for what, (theirs, ours) in sizes.items():
        if theirs < ours:
            raise InputError(f"teacher {folder} has {theirs} {what}, fewer than its student, which has {ours}")
    if config.vocab_size != student.config.vocab_size:
        raise InputError(
            f"teacher {folder} has a vocabulary of {config.vocab_size}, its student one of {student.config.vocab_size}"
        )
    teacher = load(AutoModelForMaskedLM, config, None, folder)
    if initialise:
        begin_with_layers(student, teacher)
    return teacher.requires_grad_(False).eval()


def same_vocabulary(folder: str, own: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase, data: str) -> None:
    """Raises InputError where the tokens of a checkpoint are not those that the data was made with."""
    if own.get_vocab() != tokenizer.get_vocab():
        raise InputError(f"{folder} has other tokens than the data in {data}: prepare the text with its tokenizer")


def save(folder: str, model: PreTrainedModel, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes what `from_pretrained` and `pipeline` of transformers load.

    Args:
        folder: local.
        weights: the model's state_dict on the host.
    """
    logging.disable_progress_bar()
    on_host = type(model)(model.config)
    on_host.load_state_dict(weights)
    on_host.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
