"""Which axis of the devices cuts which parameter, for `--mesh data=4,model=2` of the scripts: a table for each model;
those of XLNet and the Transformer stand beside them.

Over "model" attention is cut by heads and a feed-forward layer by its inner width, so that each takes one all-reduce
forward and one backward (Shoeybi et al. 2019, arXiv:1909.08053, section 3). The embedding of the vocabulary and the
head that it is tied to are cut by words, and the loss is computed on the parts. All else is whole on every device.
"""

from dataclasses import dataclass

from torch import nn

import optional
from errors import InputError

OUT, IN, VECTOR = ("model", None), (None, "model"), ("model",)  # of a weight [out, in], and of a bias

# How the name of a parameter ends, as a pattern -> the axis over which each of its dimensions is cut.
BERT = {
    r"attention\.self\.(query|key|value)\.weight": OUT,
    r"attention\.self\.(query|key|value)\.bias": VECTOR,
    r"attention\.output\.dense\.weight": IN,
    r"intermediate\.dense\.weight": OUT,
    r"intermediate\.dense\.bias": VECTOR,
    r"\d+\.output\.dense\.weight": IN,
    r"word_embeddings\.weight": OUT,
}
DISTILBERT = {
    r"attention\.[qkv]_lin\.weight": OUT,
    r"attention\.[qkv]_lin\.bias": VECTOR,
    r"attention\.out_lin\.weight": IN,
    r"ffn\.lin1\.weight": OUT,
    r"ffn\.lin1\.bias": VECTOR,
    r"ffn\.lin2\.weight": IN,
    r"word_embeddings\.weight": OUT,
}
# The biases of the heads of language models, whose weight is the embedding's.
HEADS = {
    "cls": {r"cls\.predictions\.bias": VECTOR},
    "lm_head": {r"lm_head\.bias": VECTOR},
    "vocab_projector": {r"vocab_projector\.bias": VECTOR},
    "lm_loss": {r"lm_loss\.bias": VECTOR},
}


@dataclass(frozen=True)
class Rules:
    """How a model may be cut; see train/common/sharding."""

    parameters: dict[str, tuple]  # a table as those above
    layers: tuple[str, ...]  # the lists of layers
    heads: int  # what "model" must divide
    shared: str = ""  # pattern of the modules in which several products take the input
    time_major: str = ""  # pattern of the modules whose tensors are [T, B, …]


def rules(model: nn.Module) -> Rules:
    """Returns the rules of an encoder of transformers, with or without the head of a language model.

    Raises:
        InputError: it has none.
    """
    tables = {
        "bert": (BERT, "bert.encoder.layer", r"attention\.self$", ""),
        "roberta": (BERT, "roberta.encoder.layer", r"attention\.self$", ""),
        "distilbert": (DISTILBERT, "distilbert.transformer.layer", r"attention$", ""),
        "xlnet": ({}, "transformer.layer", "", r"transformer\."),
    }
    kind = model.config.model_type
    if kind not in tables:
        raise InputError(
            f"--mesh, --shard-state and --remat know {', '.join(tables)}, not {kind}: leave them out, or add a table "
            "for it to models/partition.py"
        )
    parameters, layers, shared, time_major = tables[kind]
    if kind == "xlnet":
        parameters = optional.load("xlnet").CUTS
    for name, table in HEADS.items():
        if hasattr(model, name):
            parameters = parameters | table
    return Rules(parameters, (layers,), model.config.num_attention_heads, shared, time_major)
