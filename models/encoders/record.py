"""The fields of a record: all that the project knows of one encoder.

The records are the files beside this one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from models.partition import Axes

# The class of a layer -> the class that replaces it.
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
        batch_size: sequences of an update, over all devices.
        clip: largest norm of all gradients; infinite: they are not clipped.
        best: the metric by which the best checkpoint is chosen, as --best has it; "": the last
            checkpoint is the result.
        tasks: a task of GLUE -> the fields that are others for it.
    """

    source: str
    checkpoint: str
    lr: float
    warmup: float
    weight_decay: float
    epochs: float
    beta2: float = 0.999
    batch_size: int = 32
    clip: float = 1.0
    best: str = ""
    tasks: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)

    def of_task(self, task: str) -> "FineTuning":
        """Returns the recipe of one of GLUE's tasks."""
        return replace(self, **self.tasks.get(task, {}))


@dataclass(frozen=True)
class QuestionAnswering:
    """The published recipe of extractive question answering, on SQuAD.

    Attributes:
        source: the paper and its section.
        lr: peak learning rate.
        warmup: share of the steps in which the learning rate rises.
        weight_decay, beta2: of AdamW.
        epochs: passes over the data.
        batch_size: rows of an update, over all devices.
        clip: largest norm of all gradients; infinite: they are not clipped.
        max_length: tokens of a row.
        no_answer: the fields that are others where some questions have no answer (SQuAD 2.0).
    """

    source: str
    lr: float
    warmup: float
    weight_decay: float
    epochs: float
    batch_size: int
    beta2: float = 0.999
    clip: float = 1.0
    max_length: int = 384
    no_answer: Mapping[str, float] = field(default_factory=dict)

    def of_data(self, has_unanswerable: bool) -> "QuestionAnswering":
        """Returns the recipe for data with or without questions that have no answer."""
        return replace(self, **(self.no_answer if has_unanswerable else {}))


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
class Partition:
    """How --mesh may split the parameters over the devices; see models/partition.py.

    Attributes:
        parameters: a pattern of the end of a parameter's name -> the axes of its dimensions.
        layer_list: path of the list of layers in a model.
        shared: a pattern, found anywhere in the name of a module whose input several projections
            share (query, key, value): their gradients are summed before the all-reduce.
        time_major: a pattern of the beginning of a module's name where its tensors are [T, B, …].
    """

    parameters: Mapping[str, Axes]
    layer_list: str
    shared: str = ""
    time_major: str = ""


@dataclass(frozen=True)
class LanguageHead:
    """The head that pretraining trains.

    Attributes:
        module: its name in the model.
        parameters: as `Partition.parameters`, of the parameters that it does not share with the
            embedding.
        token_logits: computes logits [B, P, vocabulary] from the model and the hidden states
            [B, P, H] of the P predicted tokens. transformers' own forward pass would score all T
            tokens of a row.
        next_sentence_logits: computes logits [B, 2] from the model and its pooled output [B, H];
            index 0: the second half of the row follows the first, 1: it is from elsewhere. None:
            the model does not predict this.
    """

    module: str
    parameters: Mapping[str, Axes]
    token_logits: Callable[[PreTrainedModel, Tensor], Tensor]
    next_sentence_logits: Callable[[PreTrainedModel, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Encoder:
    """An encoder, one of --model.

    Attributes:
        architecture: transformers' name of it, `model_type` in a config.json; "": any.
        tokenizer: the kind of its vocabulary, one of KINDS in data/vocabulary.py; it also says how
            rows are made for pretraining.
        published: the configuration of the published model. Copy it before you change it.
        new_configuration: returns that of a new model from its size, a tokenizer (whose length and
            special tokens count) and the longest row in tokens.
        partition: how its parameters may be split, see Partition.
        language_head: the head that pretraining trains, see LanguageHead.
        fine_tuning: the recipe of train/glue.py.
        question_answering: the recipe of train/squad.py; its checkpoint is that of `fine_tuning`.
        tagging: that of train/tagging.py; None: none was published, and `fine_tuning` is taken.
        objective: the module that train/pretrain.py computes losses with: models.masked_words,
            models.permutation or models.distillation. A copy for fine-tuning does without it.
        pretraining: the recipe of train/pretrain.py.
        pretraining_of_size: where another size (a key of SIZES) has other numbers.
        teacher: the encoder that a new one learns from in pretraining; "": none.
        token_types: whether pretraining gives it the types of tokens. In fine-tuning this decides
            only where the configuration has no type_vocab_size.
        classifier_inputs: what a classifier takes besides tokens, mask and types.
        berts_layers: the module of the base model that has BERT's layers, or DistilBERT's; "": the
            encoder has others. They may see several short rows in one (`ShortRows` in
            models/encoder_layers.py), and compute the last layer for used tokens only
            (models/last_layer.py).
        own_layers: maps, for a configuration, layer classes to their replacements, besides those of
            every encoder; raises InputError for a configuration that these cannot compute.
        read_folder: reads a checkpoint that transformers cannot; returns its configuration, its
            weights by transformers' names, and its tokenizer.
        write_folder: writes such a folder, from its path, a configuration, weights and a tokenizer.
    """

    architecture: str
    tokenizer: str
    published: PreTrainedConfig
    new_configuration: Callable[[Size, PreTrainedTokenizerBase, int], PreTrainedConfig]
    partition: Partition
    language_head: LanguageHead
    fine_tuning: FineTuning
    question_answering: QuestionAnswering
    objective: str
    pretraining: Pretraining
    pretraining_of_size: Mapping[str, Pretraining] = field(default_factory=dict)
    tagging: FineTuning | None = None
    teacher: str = ""
    token_types: bool = False
    classifier_inputs: Mapping[str, object] = field(default_factory=dict)
    berts_layers: str = ""
    own_layers: Callable[[PreTrainedConfig], LayerClasses] | None = None
    read_folder: Callable | None = None
    write_folder: Callable | None = None
