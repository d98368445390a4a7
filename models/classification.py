"""Encoders that classify sequences: the model with its head, its logits and its losses.

    found = classifier(checkpoint.config, ("negative", "positive"), checkpoint.source)
    loss = losses(logits(found.model, batch), batch["labels"]).mean()

Which row of a checkpoint's head is which class is decided by names, see heads.py.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from errors import InputError
from models import architectures, encoder_files, encoders, heads
from models.encoder_files import Loaded, Source

# Heads of these models have the names of a classifier's, and no use for one.
OTHER_JOBS = ("ForTokenClassification", "ForMultipleChoice", "ForEntityClassification")


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
) -> Classifier:
    """Returns a model that classifies sequences by these labels, or gives one number without any.

    A checkpoint's head is kept where its classes have the names of the labels: its rows are put
    into the order of these. Otherwise the head is new.

    Args:
        settings: of the checkpoint, or of a new model; the labels are written into it.
        source: of the checkpoint's weights; None: all weights are new.
        stated: the labels in the order of the checkpoint's rows, which counts before its own names.

    Raises:
        InputError: as `encoder_files.load`; the order is stated of a head that is not there; the
            checkpoint's names contradict themselves.
    """
    theirs = copy.deepcopy(settings)
    settings.num_labels = max(len(labels), 1)
    settings.problem_type = "single_label_classification" if labels else "regression"
    if labels:
        settings.id2label = dict(enumerate(labels))
        settings.label2id = {name: number for number, name in enumerate(labels)}
    if source is None:
        model = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
        return Classifier(model, heads.HeadDecision())

    loaded = encoder_files.load(AutoModelForSequenceClassification, settings, source)
    label_dims = _label_dims(loaded.model)
    head = _head(loaded, label_dims, theirs, source, labels, stated)
    if stated and head.rows is None:
        raise InputError(f"--labels states the order of a head's classes, but {head.why_new}")

    not_loaded = loaded.missing | loaded.other_shapes.keys()
    if label_dims.keys().isdisjoint(not_loaded):  # else transformers has made it new
        if head.rows is None:
            _make_new(loaded.model, label_dims)
        elif head.moved:
            _put_in_order(loaded.model, label_dims, head.rows)
    return Classifier(loaded.model, head)


def _head(
    loaded: Loaded,
    label_dims: dict[str, int],
    theirs: PreTrainedConfig,
    source: Source,
    labels: Sequence[str],
    stated: Sequence[str],
) -> heads.HeadDecision:
    """Decides what becomes of a checkpoint's head.

    Args:
        label_dims: as `_label_dims` returns it.
        theirs: the configuration of the checkpoint, before it got our labels.
    """
    where = f"checkpoint {source.folder}"
    left_out = getattr(source.weights, "left_out", ())
    if left_out:
        names = ", ".join(left_out)
        of_fairseq = f"classification heads of fairseq, which are left out: {names}"
        return heads.new_head(where, of_fairseq)
    if label_dims.keys() & loaded.missing:
        return heads.HeadDecision(why_new=f"{where} has none")
    for name, shape in loaded.other_shapes.items():
        if name in label_dims:
            outputs = shape[label_dims[name]]
            needed = loaded.model.config.num_labels
            return heads.new_head(where, f"one of {outputs} outputs, and {needed} are needed")

    jobs = [name for name in theirs.architectures or [] if name.endswith(OTHER_JOBS)]
    if jobs and not stated:
        return heads.new_head(where, f"the head of a {jobs[0]}")
    below = sorted(loaded.missing - label_dims.keys())  # what its last layer was trained on
    if below:
        return heads.new_head(where, f"a head that lacks {len(below)} weights, such as {below[0]}")
    if labels:
        return heads.decide(where, _names(theirs, where, stated), labels, stated)
    if theirs.problem_type in (None, "regression"):
        return heads.HeadDecision([0])
    return heads.new_head(where, f"a head of one class, {theirs.id2label[0]}")


def _label_dims(model: PreTrainedModel) -> dict[str, int]:
    """Returns the parameters of a classifier that have a row for each label, by whatever name.

    They are those that would be larger with one label more. The value is the dimension of the rows.
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

    None where it does not number them from 0.

    Where id2label has placeholders only, which transformers fills in for one that is not there,
    label2id has the names.

    Raises:
        InputError: id2label and label2id put the same names into different orders, and nothing
            is stated.
    """
    by_number = {}
    for name, number in (settings.label2id or {}).items():
        if str(number).isdecimal():  # some files have "0" for 0
            by_number[int(number)] = name
    names = _numbered(settings.id2label)
    others = _numbered(by_number)
    has_names = names is not None and not heads.unnamed(names)
    if others and not heads.unnamed(others) and not has_names:
        return others
    if names and others and not stated:
        rows = heads.match(others, names)
        if rows is not None and rows != list(range(len(names))):
            raise InputError(
                f"{where} has the classes {heads.listed(names)} by its id2label, and others by its "
                "label2id; state their order in --labels, or correct its config.json"
            )
    return names


def _numbered(names: dict[int, str]) -> list[str] | None:
    """Returns the names of 0, 1, …; None where these are not the numbers."""
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
    """Makes the last layer of a loaded head new, as the model itself does where it can."""
    with torch.no_grad():
        for name in label_dims:
            parameter = model.get_parameter(name)
            parameter._is_hf_initialized = False  # else transformers leaves it as it is
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.zero_()

        modules = dict.fromkeys(name.rpartition(".")[0] for name in label_dims)
        for module in modules:
            model._init_weights(model.get_submodule(module))


def logits(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Returns a classifier's logits [B, labels].

    Args:
        batch: "input_ids", "attention_mask" and "token_type_ids" [B, T].
    """
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if architectures.takes_types(model):
        inputs["token_type_ids"] = batch["token_type_ids"]
    encoder = encoders.record_of(model.config)
    if encoder is not None:
        inputs |= encoder.classifier_inputs
    return model(**inputs).logits


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns each example's cross-entropy, or the squared error of one output, float32 [B].

    Args:
        logits: [B, labels].
    """
    if logits.shape[1] == 1:
        return (logits[:, 0].float() - labels).square()
    return F.cross_entropy(logits.float(), labels.long(), reduction="none")
