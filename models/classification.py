"""Encoders that classify sequences: the model with its head, its logits and its losses. The heads
of token_classification.py are opened here, too.

    found = classifier(checkpoint.config, ("negative", "positive"), checkpoint.source)
    logits = compute_logits(found.model, batch)
    loss = compute_losses(logits, batch["labels"]).mean()

Names decide which row of a checkpoint's head is which class, see heads.py.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from errors import InputError
from models import architectures, encoder_files, encoders, heads, last_layer
from models.encoder_files import Loaded, Source

# Models whose head has the same name as a classifier's, but was trained for another task.
OTHER_TASKS = ("ForTokenClassification", "ForMultipleChoice", "ForEntityClassification")

# transformers' name of what a classifier's outputs mean -> that of an objective.
PROBLEM_TYPES = {
    "classes": "single_label_classification",
    "multilabel": "multi_label_classification",
    "regression": "regression",
}


@dataclass(frozen=True)
class Classifier:
    """A model that classifies sequences, and what became of the head of its checkpoint."""

    model: PreTrainedModel
    head: heads.HeadDecision


def classifier(
    settings: PreTrainedConfig,
    labels: Sequence[str],
    source: Source | None,
    stated: Sequence[str] = (),
    objective: str = "",
) -> Classifier:
    """Returns a model that classifies sequences by these labels.

    A checkpoint's head is kept where its classes have the names of the labels: its rows are put
    into the order of the labels. Otherwise the head is new.

    Args:
        settings: of the checkpoint, or of a new model; the labels are written into it.
        labels: the names of the classes or labels; of a regression that of its number, or ().
        source: of the checkpoint's weights; None: all weights are new.
        stated: the labels in the order of the checkpoint's rows, as the user states it; counts
            before the checkpoint's own names. (): not stated.
        objective: a key of PROBLEM_TYPES; "": classes, or a regression where there are no labels.

    Raises:
        InputError: as `encoder_files.load`; the order is stated, but the head is not kept; or the
            checkpoint's names contradict each other.
    """
    if not objective:
        objective = "classes" if labels else "regression"
    of_checkpoint = copy.deepcopy(settings)  # keeps its own labels
    settings.num_labels = max(len(labels), 1)
    settings.problem_type = PROBLEM_TYPES[objective]
    if labels:
        settings.id2label = dict(enumerate(labels))
        settings.label2id = {name: number for number, name in enumerate(labels)}

    kind = HeadKind(AutoModelForSequenceClassification, OTHER_TASKS)
    return with_head(kind, settings, of_checkpoint, source, labels, stated)


@dataclass(frozen=True)
class HeadKind:
    """What a head is for.

    Attributes:
        auto_class: transformers' class of models with such a head.
        other_tasks: ends of the names of models whose head has the same name, but was trained for
            another task.
    """

    auto_class: type
    other_tasks: tuple[str, ...]


def with_head(
    kind: HeadKind,
    settings: PreTrainedConfig,
    of_checkpoint: PreTrainedConfig,
    source: Source | None,
    labels: Sequence[str],
    stated: Sequence[str],
) -> Classifier:
    """Returns a model with a head of this kind; see `classifier`.

    Args:
        settings: of the model, with its labels.
        of_checkpoint: the checkpoint's, with its own.
    """
    if source is None:
        model = kind.auto_class.from_config(settings, dtype=torch.float32)
        return Classifier(model, heads.HeadDecision())

    loaded = encoder_files.load(kind.auto_class, settings, source)
    label_dims = _label_dims(loaded.model)
    head = _decide_head(loaded, label_dims, of_checkpoint, source, labels, stated, kind)
    if stated and head.rows is None:
        raise InputError(f"--labels states the order of a head's classes, but {head.why_new}")

    # Where its last layer was not loaded, transformers has already initialised it.
    not_loaded = loaded.missing | loaded.other_shapes.keys()
    if label_dims.keys().isdisjoint(not_loaded):
        if head.rows is None:
            _make_new(loaded.model, label_dims)
        elif head.moved:
            _put_in_order(loaded.model, label_dims, head.rows)
    return Classifier(loaded.model, head)


def _decide_head(
    loaded: Loaded,
    label_dims: dict[str, int],
    of_checkpoint: PreTrainedConfig,
    source: Source,
    labels: Sequence[str],
    stated: Sequence[str],
    kind: HeadKind,
) -> heads.HeadDecision:
    """Decides what becomes of a checkpoint's head.

    The questions in their order: is there a head, does its last layer fit, was it trained for this
    task, is the rest of it there? Only then its names are compared with the labels.

    Args:
        label_dims: as `_label_dims` returns it.
        of_checkpoint: the checkpoint's configuration with its own labels.
    """
    where = f"checkpoint {source.folder}"
    left_out = getattr(source.weights, "left_out", ())
    if left_out:
        names = ", ".join(left_out)
        return heads.new_head(
            where, f"classification heads of fairseq, which are left out: {names}"
        )

    if label_dims.keys() & loaded.missing:
        return heads.HeadDecision(why_new=f"{where} has none")

    for name, shape in loaded.other_shapes.items():
        if name in label_dims:
            outputs = shape[label_dims[name]]
            needed = loaded.model.config.num_labels
            return heads.new_head(where, f"one of {outputs} outputs, and {needed} are needed")

    class_names = of_checkpoint.architectures or []
    other_tasks = [name for name in class_names if name.endswith(kind.other_tasks)]
    if other_tasks and not stated:
        return heads.new_head(where, f"the head of a {other_tasks[0]}")

    # Layers below the last one, which was trained on their results.
    missing_below = sorted(loaded.missing - label_dims.keys())
    if missing_below:
        return heads.new_head(
            where,
            f"a head that lacks {len(missing_below)} weights, such as {missing_below[0]}",
        )

    needed = loaded.model.config.problem_type
    if needed == PROBLEM_TYPES["regression"]:
        if of_checkpoint.problem_type in (None, needed):
            return heads.HeadDecision([0])
        return heads.new_head(where, f"a head of one class, {of_checkpoint.id2label[0]}")
    if needed == PROBLEM_TYPES["multilabel"] and of_checkpoint.problem_type not in (None, needed):
        return heads.new_head(where, f"a head for {of_checkpoint.problem_type}")

    names = _names(of_checkpoint, where, stated)
    return heads.decide(where, names, labels, stated)


def _label_dims(model: PreTrainedModel) -> dict[str, int]:
    """Returns the parameters of a classifier that have a row for each label -> which dimension.

    They are found by their shapes and not by their names: with one label more they would be larger.
    """
    settings = copy.deepcopy(model.config)
    settings.num_labels += 1
    with torch.device("meta"):
        larger = type(model)(settings)
    dims = {}
    for name, parameter in model.named_parameters():
        other = larger.get_parameter(name)
        for dim in range(parameter.dim()):
            if parameter.shape[dim] != other.shape[dim]:
                dims[name] = dim
    return dims


def _names(settings: PreTrainedConfig, where: str, stated: Sequence[str]) -> list[str] | None:
    """Returns the names that a configuration gives the rows of its head.

    They are id2label's. Where these are not numbered from 0, or are placeholders (transformers
    fills in LABEL_0, LABEL_1, … for an id2label that is missing), label2id's real names count.

    None: id2label's are not numbered from 0, and label2id has no real names.

    Raises:
        InputError: id2label and label2id put the same names into different orders, and nothing
            is stated.
    """
    label2id = {}
    for name, number in (settings.label2id or {}).items():
        if str(number).isdecimal():  # some files have "0" for 0
            label2id[int(number)] = name
    by_id2label = _numbered(settings.id2label)
    by_label2id = _numbered(label2id)

    has_names = by_id2label is not None and not heads.unnamed(by_id2label)
    if not has_names and by_label2id and not heads.unnamed(by_label2id):
        return by_label2id

    if by_id2label and by_label2id and not stated:
        rows = heads.match(by_label2id, by_id2label)
        if rows is not None and rows != list(range(len(by_id2label))):
            raise InputError(
                f"{where} has the classes {heads.listed(by_id2label)} by its id2label, "
                "and others by its label2id; "
                "state their order in --labels, or correct its config.json"
            )
    return by_id2label


def _numbered(names: dict[int, str]) -> list[str] | None:
    """Returns the names in the order of their numbers; None where these are not 0, 1, …"""
    numbers = range(len(names))
    if set(names) != set(numbers):
        return None
    return [names[number] for number in numbers]


def _put_in_order(model: PreTrainedModel, label_dims: dict[str, int], rows: Sequence[int]) -> None:
    """Puts the rows of a loaded head into another order: row rows[i] becomes row i."""
    indices = torch.tensor(rows)
    with torch.no_grad():
        for name, dim in label_dims.items():
            parameter = model.get_parameter(name)
            parameter.copy_(parameter.index_select(dim, indices))


def _make_new(model: PreTrainedModel, label_dims: dict[str, int]) -> None:
    """Initialises the last layer of a loaded head again.

    The model does it in its own way; what that leaves out has the usual initial weights.
    """
    with torch.no_grad():
        for name in label_dims:
            parameter = model.get_parameter(name)
            parameter._is_hf_initialized = False  # otherwise transformers leaves it as it is
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.zero_()

        modules = dict.fromkeys(name.rpartition(".")[0] for name in label_dims)
        for module in modules:
            model._init_weights(model.get_submodule(module))


def compute_logits(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Returns a classifier's logits [B, labels].

    Args:
        batch: "input_ids", "attention_mask" and "token_type_ids" [B, T].
    """
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if architectures.takes_types(model):
        inputs["token_type_ids"] = batch["token_type_ids"]
    encoder = encoders.by_config(model.config)
    if encoder is not None:
        inputs |= encoder.classifier_inputs
    inputs |= last_layer.of_classifier(model)
    return model(**inputs).logits


def compute_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns each example's loss, float32 [B].

    It is the cross-entropy of classes; of several labels the mean of their binary cross-entropies;
    or the squared error of one output.

    Args:
        logits: [B, labels].
        labels: numbers of classes [B]; 0 and 1 for each of several labels [B, labels]; for one
            output, the numbers that it should be [B].
    """
    if labels.dim() == 2:
        losses = F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
        return losses.mean(1)
    if logits.shape[1] == 1:
        return (logits[:, 0].float() - labels).square()
    return F.cross_entropy(logits.float(), labels.long(), reduction="none")
