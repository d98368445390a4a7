"""The fields of a record: all that the project knows of one encoder.

The records are the files beside this one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# The axis of the devices that cuts each dimension of a parameter; see models/partition.py.
Axes = tuple[str | None, ...]
# The classes of layers that are replaced, and by which.
LayerClasses = Mapping[type[nn.Module], type[nn.Module]]


@dataclass(frozen=True)
class Size:
    """How large a new encoder is. A feed-forward layer has four times the width."""

    layers: int
    width: int
    heads: int


@dataclass(frozen=True)
class FineTuning:
    """The published recipe of fine-tuning.

    Papers searched several values for each task. Here is one of them; flags give others.

    Attributes:
        source: the paper and its table.
        checkpoint: hub id of the model that is usually fine-tuned; "": --checkpoint must name one.
        lr: peak learning rate.
        warmup: share of the steps in which the learning rate rises.
        weight_decay, beta2: of AdamW.
        epochs: passes over the data.
    """

    source: str
    checkpoint: str
    lr: float
    warmup: float
    weight_decay: float
    epochs: float
    beta2: float = 0.999


@dataclass(frozen=True)
class Pretraining:
    """The published recipe of pretraining.

    Attributes:
        source: the paper and its table.
        batch_size: rows of an update, over all devices.
        steps: updates.
        lr: peak learning rate.
        warmup_steps: updates in which the learning rate rises.
        weight_decay, beta2: of AdamW.
        clip: largest norm of all gradients; infinite: they are not clipped.
    """

    source: str
    batch_size: int
    steps: int
    lr: float
    warmup_steps: int
    weight_decay: float
    beta2: float
    clip: float


@dataclass(frozen=True)
class Cuts:
    """Which axis of the devices cuts which parameter, for --mesh; see models/partition.py.

    Attributes:
        parameters: how the name of a parameter ends, as a pattern -> the axes of its dimensions.
        layers: path of the list of layers in a model.
        shared: pattern of the modules in which several products take the input.
        time_major: pattern of the modules whose tensors are [T, B, …].
    """

    parameters: Mapping[str, Axes]
    layers: str
    shared: str = ""
    time_major: str = ""


@dataclass(frozen=True)
class LanguageHead:
    """The head that pretraining trains.

    Attributes:
        module: its name in the model.
        cuts: as `Cuts.parameters`, of the parameters that it does not share with the embedding.
        words: computes logits [B, P, words] from the model and the hidden states [B, P, H] of P
            places. transformers' own forward pass would score all T places of a row.
        next_sentence: computes logits [B, 2] from the model and its pooled output [B, H]; None: the
            model does not predict whether one half of a row follows the other.
    """

    module: str
    cuts: Mapping[str, Axes]
    words: Callable[[PreTrainedModel, Tensor], Tensor]
    next_sentence: Callable[[PreTrainedModel, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Encoder:
    """An encoder, one of --model.

    Attributes:
        architecture: transformers' name of it, `model_type` in a config.json; "": any.
        tokenizer: the kind of its vocabulary, one of KINDS in data/vocabulary.py; it also says how
            rows are made for pretraining.
        published: the configuration of the published model. Copy it before you change it.
        configuration: makes that of a new model from its size, a tokenizer (whose length and
            special tokens count) and the longest row in tokens.
        cuts, head: see there.
        fine_tuning: the recipe of train/glue.py.
        objective: the module in models/ that train/pretrain.py computes losses with: masked_words,
            permutation, distillation. A copy for fine-tuning does without it.
        pretraining: the recipe of train/pretrain.py.
        pretraining_of_size: where another size (a key of SIZES) has other numbers.
        teacher: the encoder that a new one learns from in pretraining; "": none.
        vmem_kib: memory of a TPU core for one fusion in pretraining; 0: the compiler's own choice.
        token_types: whether pretraining gives it the types of tokens. So does fine-tuning where the
            configuration counts no types.
        classifier_inputs: what a classifier takes besides tokens, mask and types.
        packed_layers: the module of the base model whose layers may see several short rows in one,
            see `ShortRows` in models/encoder_layers.py; "": none.
        own_layers: returns which classes of the model are replaced by which, besides those of every
            encoder, for a configuration; raises InputError where that cannot be.
        read_folder: reads a checkpoint that transformers cannot; returns its configuration, its
            weights by transformers' names, and its tokenizer.
        write_folder: writes such a folder, from its path, a configuration, weights and a tokenizer.
    """

    architecture: str
    tokenizer: str
    published: PreTrainedConfig
    configuration: Callable[[Size, PreTrainedTokenizerBase, int], PreTrainedConfig]
    cuts: Cuts
    head: LanguageHead
    fine_tuning: FineTuning
    objective: str
    pretraining: Pretraining
    pretraining_of_size: Mapping[str, Pretraining] = field(default_factory=dict)
    teacher: str = ""
    vmem_kib: int = 0
    token_types: bool = False
    classifier_inputs: Mapping[str, object] = field(default_factory=dict)
    packed_layers: str = ""
    own_layers: Callable[[PreTrainedConfig], LayerClasses] | None = None
    read_folder: Callable | None = None
    write_folder: Callable | None = None
