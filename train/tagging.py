"""Token classification: fine-tuning BERT, RoBERTa, or another encoder to find named entities.

paper     Devlin et al. 2019, BERT (arXiv:1810.04805), section 5.3: the first piece of a word is
          labelled; task and metric: Tjong Kim Sang and De Meulder 2003, CoNLL-2003
data      files of columns, as CoNLL-2003 has them; JSON lines or parquet with lists of words and
          tags; a data set of the Hugging Face hub, or saved by `datasets`: data/tagging.py
run       python -m train.tagging tiny                                  a synthetic task: half a
                                                                        minute on two CPU cores
          python -m train.tagging full --data conll2003                 a folder, on a TPU VM
          python -m train.tagging full --data own.jsonl --words words --tags tags
metric    F1 of entities, as seqeval and conlleval compute it; BERT-base has 96.4 on CoNLL-2003's
          development set, and 92.4 on its test set (table 7)
result    of published checkpoints: not run yet (they could not be downloaded here)
"""

if __name__ == "__main__" and not __package__:  # by its path: the imports below are not found
    raise SystemExit(
        "error: in the project's folder run it as a module: python -m train.tagging tiny"
    )

import itertools
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from data import batching, entities, splits, tagging, vocabulary, windows
from errors import InputError
from models import (
    architectures,
    classification,
    encoder_files,
    encoder_layers,
    encoders,
    heads,
    layers,
    token_classification,
)
from models.encoders.record import FineTuning
from train.common import accumulate, checkpoint, cli, device, files, loading
from train.common.batches import Examples
from train.common.evaluation import FinishedRun, resolve_config
from train.common.mesh import WHOLE, Layout, Mesh
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    model: Literal[encoders.NAMES] = "bert"  # auto: the architecture of --checkpoint (docs/data.md)
    data: str = ""  # file, folder or URL; saved by HF datasets; HF hub id; "synthetic"
    words: str = ""  # of JSON lines or tables: the column with lists of words; "": tokens
    tags: str = ""  # of the same: the column with lists of tags; "": ner_tags
    tag_names: tuple[str, ...] = ()  # where tags are numbers without names: O B-PER …, from 0 on
    word_column: int = 1  # of files with a word a line: the number of the word's field, from 1
    tag_column: int = 0  # of the same: that of the tag's; 0: the last field
    evaluate: str = ""  # a finished run's folder: nothing is trained, its export is evaluated
    split: str = ""  # of --data, with --evaluate: train, valid, test; "": as in training
    checkpoint: str = ""  # HF hub id or folder; "new": new weights and words; "": the recipe's
    pretrained: bool = True  # False: of --checkpoint only configuration and tokenizer; new weights
    labels: str = ""  # of --checkpoint's head: its classes in order, a,b,…; where it names none
    lengths: tuple[int, ...] = (32, 64, 128)  # tokens: a compiled shape each; longer: split up
    group_by_length: bool = False  # batches of like length: less padding, but less accurate
    batch_size: int | None = None  # sequences per update, over all devices; None: model's recipe
    update_every: int = 1  # gradient-accumulation steps: micro-batches that a batch is cut into
    epochs: float | None = None  # passes over the data; None: the recipe
    lr: float | None = None  # peak learning rate; None: the recipe
    warmup: float | None = None  # share of steps that lr rises in; then it falls to 0; None: recipe
    weight_decay: float | None = None  # of AdamW; not of biases and norms; None: the recipe
    clip: float | None = None  # largest norm of all gradients; inf: not clipped; None: the recipe
    best: str | None = None  # exports the best by f1, f1_PER, -loss, …; "": the last; None: recipe
    patience: int = 0  # evaluations without a better --best that end the training; 0: none do
    precision: Literal["bfloat16", "float32", "fast_float32"] = "bfloat16"  # train/common/device.py
    device: Literal["xla", "cpu", "cuda", "tpu"] = "xla"  # xla: TPU, CPU; tpu: TorchTPU, never run
    layout: Layout = WHOLE  # --mesh, --shard-state, --remat: docs/large_models.md
    seed: int = 0  # of new weights, the order of the data and dropout
    workers: int = 1  # processes per host that make batches; -1: one per core, 0: none
    log_every: int = 50  # steps between lines of metrics
    eval_every: int = 0  # steps between evaluations; 0: an epoch
    save_every: int = 0  # steps between checkpoints besides those at evaluations; 0: none
    keep: int = 1  # checkpoints that stay
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes: docs/tpu.md


TINY = Config(
    **cli.TRIAL,
    lengths=(16,),
    batch_size=32,
    epochs=4,
    lr=3e-3,
    weight_decay=0.01,
    clip=1.0,
)

# Fields that a resumed run may change: these do not change the trained weights.
MAY_CHANGE = ("workers", "log_every", "save_every", "strict", "layout", "safe_forms")
# Flags that may be given with --evaluate; all others are the run's. They change no number beyond
# rounding, or say where other data have words and tags.
EVALUATE_FLAGS = (
    "batch_size",
    "update_every",
    "words",
    "tags",
    "tag_names",
    "word_column",
    "tag_column",
)
COLUMNS = "columns.json"  # of an export: what `make predict` needs to know of the training
# Fields whose None is the recipe's value.
OF_RECIPE = ("batch_size", "epochs", "lr", "warmup", "weight_decay", "clip", "best")
ADAM_EPS = 1e-6  # of BERT's and DistilBERT's code, and in RoBERTa's and XLNet's papers
SYNTHETIC_SIZE = "tiny"  # a trial's network
SYNTHETIC_WORDS = 400  # a trial's largest vocabulary
SYNTHETIC_INIT = 0.05  # the spread of a trial's new weights

# New weights: a network and a vocabulary that a few thousand sentences train in a minute.
NEW = "new"  # as --checkpoint
NEW_SIZE = "tiny"
NEW_WORDS = 8000  # the largest vocabulary
NEW_RECIPE = FineTuning(
    source="new weights need a higher rate and more epochs (as sentences of train/glue.py)",
    checkpoint=NEW,
    lr=1e-3,
    warmup=0.1,
    weight_decay=0.01,
    epochs=5,
)

# On TPUs, see `on_device`: a batch has at least so many parts, within which rows are joined. So 1,
# 2, 4 and 8 devices join the same rows.
PACKING_PARTS = 8


class Data(NamedTuple):
    """What a run reads."""

    train: windows.Encoded | None  # None: a finished run is evaluated
    eval: dict[str, windows.Encoded]  # by split
    model: nn.Module  # on the host
    tokenizer: PreTrainedTokenizerBase
    task: tagging.Task  # what the words are tagged with
    head_message: str = ""  # what the user should know of the weights that training starts from


class State(NamedTuple):
    """What a step works on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None  # None: nothing is trained


def learning_rate(config: Config, step: int, total_steps: int) -> float:
    """Returns the rate at 0-based `step`: linear warm-up, then linearly to 0."""
    warmup_steps = config.warmup * total_steps  # not a whole number
    if step < warmup_steps:
        # + 1 in the divisor, too, or the last of these steps could exceed the peak.
        return config.lr * (step + 1) / (warmup_steps + 1)
    # Where the warm-up leaves less than one step, only a step after the last comes here.
    steps_to_fall = max(total_steps - warmup_steps, 1)
    return config.lr * (total_steps - step) / steps_to_fall


def recipe_of(config: Config) -> FineTuning:
    """Returns the recipe of tagging that was published for the model, or else that of its
    fine-tuning; our own for new weights."""
    if config.checkpoint == NEW:
        return NEW_RECIPE
    encoder = encoders.by_name(config.model)
    return encoder.tagging or encoder.fine_tuning


def describe_recipe(config: Config) -> str:
    """Returns what the user should know of a recipe that was published for another task; "" of
    others, of trials and of new weights, which have a message of their own."""
    is_published = encoders.by_name(config.model).tagging is not None
    if is_published or config.data == "synthetic" or config.checkpoint == NEW:
        return ""
    return (
        f"no recipe of tagging is published for {config.model}: where no flag says it, batch, "
        "epochs and rate are those of its fine-tuning on sentences"
    )


def with_recipe(config: Config) -> Config:
    """Returns the config with the recipe's numbers where a field is None."""
    recipe = recipe_of(config)
    for name in OF_RECIPE:
        if getattr(config, name) is None:
            config = replace(config, **{name: getattr(recipe, name)})
    return config


def validate(config: Config) -> Config:
    """Returns the config with the model's recipe where a field is None; raises InputError where a
    value is outside its range."""
    config = with_recipe(config)
    cli.at_least(config, 1, "batch_size", "update_every", "log_every", "keep", "word_column")
    cli.at_least(config, 0, "lr", "weight_decay", "eval_every", "save_every", "seed", "patience")
    cli.at_least(config, 0, "tag_column")
    cli.at_least(config, -1, "workers")
    cli.at_least(config, 0, "warmup", below=1)
    cli.at_least(config, 0, "clip", above=True)
    cli.at_least(config, 0, "epochs", above=True, below=math.inf)
    rising = list(config.lengths) == sorted(set(config.lengths))
    if not config.lengths or not rising or config.lengths[0] < 8:
        raise InputError(f"--lengths are {config.lengths}; they must rise and be at least 8")

    cli.need_data(config, "a folder of CoNLL-2003's form, or JSON lines with tokens and ner_tags")
    if not config.checkpoint and config.data != "synthetic":
        usual = recipe_of(config).checkpoint
        if not usual:
            raise InputError(f"--checkpoint is missing: --model {config.model} needs one")
        config = replace(config, checkpoint=usual)
    if config.labels and (learns_words(config) or not config.pretrained):
        raise InputError(
            f"--labels is {config.labels}; it is for the head of a --checkpoint with its weights"
        )
    return config


def learns_words(config: Config) -> bool:
    """Returns whether weights and vocabulary are new: with --checkpoint new, and in a trial."""
    # "" is a trial once `validate` has filled in the recipe's checkpoint.
    return config.checkpoint in ("", NEW)


def open_data(config: Config) -> Data:
    """Opens the splits and the model, and encodes the splits with its tokenizer."""
    opened = tagging.open_splits(config.data, columns_of(config), config.seed)
    encoder = _open_encoder(config, opened.train)
    tokenizer = encoder.tokenizer
    tagger = _open_tagger(config, opened.task, encoder)

    train = windows.Encoded(opened.train, tokenizer, config.lengths[-1], opened.task.labels)
    evaluated = encode(opened.eval, tokenizer, config, opened.task)

    if config.checkpoint == NEW:
        head_message = _describe_new(config, tokenizer)
    else:
        head_message = tagger.head.message
        # A checkpoint that never had a head may be evaluated untrained, but the user is told.
        if tagger.head.is_new and config.lr == 0:
            head_message += "; --lr 0 does not train it"
    messages = [describe_recipe(config), head_message]
    for examples in (train, *evaluated.values()):
        messages += examples.notes
    head_message = "\n".join(filter(None, messages))
    return Data(train, evaluated, tagger.model, tokenizer, opened.task, head_message)


def columns_of(config: Config) -> tagging.Columns:
    """Returns where the data have words and tags."""
    return tagging.Columns(
        config.words, config.tags, config.tag_names, config.word_column, config.tag_column
    )


def encode(
    sentences_of: dict[str, tagging.Sentences],
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    task: tagging.Task,
) -> dict[str, windows.Encoded]:
    """Returns the tokens of each split."""
    longest = config.lengths[-1]
    encoded = {}
    for split, given in sentences_of.items():
        encoded[split] = windows.Encoded(given, tokenizer, longest, task.labels)
    return encoded


@dataclass(frozen=True)
class OpenedEncoder:
    """What a tagger is made of."""

    settings: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    source: encoder_files.Source | None  # of the weights; None: all are new


def _open_encoder(config: Config, train: tagging.Sentences) -> OpenedEncoder:
    """Opens --checkpoint. With --checkpoint new, and in a trial, the tokenizer learns the words of
    the training sentences, fewer of them in a trial."""
    if not learns_words(config):
        folder = files.local_folder(config.checkpoint)
        compiled = config.device == "xla"  # refuses architectures that no compiled step can run
        opened = encoder_files.open_checkpoint(folder, config.model, compiled=compiled)
        windows.separate_words(opened.tokenizer)
        source = opened.source if config.pretrained else None
        return OpenedEncoder(opened.config, opened.tokenizer, source)

    lines = [" ".join(words) for words in train.words]
    if config.data == "synthetic":
        # XLNet's vocabulary is learnt from what different words have in common: of "hill" and
        # "hill,", that is "hill".
        lines += [", ".join(words) for words in train.words]
    kind = encoders.by_name(config.model).tokenizer
    longest = config.lengths[-1]
    # Repeatable, since other hosts and a resumed run learn it, too.
    if config.checkpoint == NEW:
        tokenizer = vocabulary.learn(lines, kind, NEW_WORDS, repeatable=True)
        settings = encoders.new_configuration(config.model, NEW_SIZE, tokenizer, longest)
    else:
        tokenizer = vocabulary.learn(lines, kind, SYNTHETIC_WORDS, repeatable=True)
        settings = encoders.new_configuration(config.model, SYNTHETIC_SIZE, tokenizer, longest)
        settings.initializer_range = SYNTHETIC_INIT
    windows.separate_words(tokenizer)
    return OpenedEncoder(settings, tokenizer, source=None)


def _describe_new(config: Config, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns what the user should know of new weights: their size and their recipe, and why."""
    size = encoders.SIZES[NEW_SIZE]
    return (
        f"new weights: {size.layers} layers of width {size.width}, and {len(tokenizer):,} tokens "
        f"learnt from the training text; --epochs {config.epochs:g} and --lr {config.lr:g}, since "
        f"{NEW_RECIPE.source}"
    )


def _open_tagger(
    config: Config, task: tagging.Task, encoder: OpenedEncoder
) -> classification.Classifier:
    """Returns the model with a head for the task's labels.

    Raises:
        InputError: --lengths exceed its positions; or --labels are not the task's; or, with --lr 0,
            which evaluates a checkpoint as it is, the checkpoint's own head does not fit the task's
            labels or does not name them. (A checkpoint without any head is allowed.)
    """
    stated = heads.parse_labels(config.labels, task.labels) if config.labels else ()
    tagger = token_classification.tagger(encoder.settings, task.labels, encoder.source, stated)

    positions = architectures.positions(tagger.model)
    if config.lengths[-1] > positions:
        raise InputError(
            f"--lengths go up to {config.lengths[-1]}; the model has {positions} positions"
        )
    if config.lr == 0 and tagger.head.refusal_at_lr_0:
        raise InputError(tagger.head.refusal_at_lr_0)
    return tagger


def check_words(tokenizer: PreTrainedTokenizerBase, mesh: Mesh) -> None:
    """Raises InputError where hosts of a pod have learnt different words."""
    words = repr(sorted(tokenizer.get_vocab().items()))
    checksum = zlib.crc32(words.encode())
    device.same_on_all_hosts(mesh, "the words that each has learnt (their CRC-32)", checksum)


def batch_plan(config: Config, examples: windows.Encoded, mesh: Mesh, train: bool) -> batching.Plan:
    """Returns which windows share a batch.

    In training they are drawn at random, unless --group-by-length; in evaluation they are of like
    length. A batch is padded to the shortest of --lengths that holds its longest example, or just
    to that example where shapes may vary (in plain PyTorch).
    """
    lengths = config.lengths
    if mesh.shapes_may_vary:
        lengths = range(1, config.lengths[-1] + 1)
    by_length = config.group_by_length or not train
    # Shuffled draws at random in training alone: an evaluation's loader gives it no generator.
    return batching.Shuffled(examples.lengths, config.batch_size, lengths, grouped=by_length)


def collate(limits: architectures.Limits, examples: Examples) -> dict[str, Tensor]:
    """Returns a batch of examples as tensors.

    The host checks that all ids are within the model's tables: on a device a wrong id would read
    another row.
    """
    tensors = loading.as_tensors(examples)
    limits.check(tensors | {"labels": tensors["labels"].clamp(min=0)})  # NO_LABEL indexes nothing
    return tensors


def build(config: Config, data: Data, mesh: Mesh) -> State:
    """Moves the model to the device and makes its optimizer there.

    The optimizer's state exists from the start: made in the first step, it would make the second
    step another graph.
    """
    model = on_device(data.model, mesh)
    groups = architectures.parameter_groups(model, config.weight_decay)
    betas = (0.9, encoders.by_name(config.model).fine_tuning.beta2)
    # device.set_lr sets the rate before each step. XLA has no foreach kernels.
    optimizer = torch.optim.AdamW(groups, config.lr, betas, ADAM_EPS, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    return State(model, optimizer)


def on_device(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Moves a model to the device, with the layers that train and evaluate there."""
    # Chooses, for the whole process, how the layers compute attention. Clamped weights compile to
    # faster programs, but some versions of the TPU's compiler crash on them (docs/tpu.md).
    layers.use_forms(clamp_weights=not mesh.safe_forms)
    # On TPUs the encoder computes several short rows as one. Rows are joined within each of
    # `packing_parts` equal parts of the batch only, so never with those of another device. 0: no
    # rows are joined.
    packing_parts = 0
    if mesh.kind.startswith("TPU"):
        packing_parts = math.lcm(PACKING_PARTS, mesh.num_devices)
    model = encoder_layers.fast_layers(model, packing_parts=packing_parts)
    return device.to_device(model, mesh, encoders.rules)


def forward(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns sums over the words of a batch or micro-batch of B rows: "loss", and "words", their
    number.

    Sums, since micro-batches have unequal numbers of words: who calls it divides by "words".

    Args:
        batch: "input_ids", "attention_mask" and "token_type_ids" [B, T]; and "labels" [B, T], below
            0 where a token is not the first piece of a word.
    """
    with mesh.autocast():
        logits = classification.compute_logits(state.model, batch)
    losses = token_classification.compute_losses(logits, batch["labels"])
    return {"loss": losses.sum(), "words": (batch["labels"] >= 0).sum().float()}


def train_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Updates once on a batch; returns the mean loss and the gradients' norm."""
    sums = forward(state, batch, config, mesh)
    loss = sums["loss"] / device.mean_over_processes(sums["words"])
    loss.backward()
    metrics = {"loss": loss.detach()}
    metrics |= update(state, config)
    state.optimizer.zero_grad(set_to_none=True)
    return metrics


def update(state: State, config: Config) -> dict[str, Tensor]:
    """Updates the parameters from their gradients; returns the norm of these."""
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.clip)
    state.optimizer.step()
    return {"gradient_norm": norm.detach()}


def eval_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns, of the whole batch, so that every host can read it: "classes" int32
    [B, T], the most probable class of each token; "probabilities" [B, T], that class's; and "loss"
    [B], the sum over a row's words."""
    with torch.no_grad(), mesh.autocast():
        logits = classification.compute_logits(state.model, batch)
    logits = logits.float()
    losses = token_classification.compute_losses(logits, batch["labels"])
    highest = logits.amax(2)
    found = {
        "classes": logits.argmax(2).int(),
        "probabilities": (highest - logits.logsumexp(2)).exp(),
        "loss": losses.sum(1),
    }
    return {name: device.whole_batch(tensor, mesh) for name, tensor in found.items()}


def check_evaluation(data: Data, config: Config, mesh: Mesh) -> None:
    """Reads the first and the last examples of each split that is evaluated; raises InputError
    where an evaluation would, and where there are no entities to be found."""
    collate_fn = partial(collate, architectures.limits(data.model))
    for split, examples in data.eval.items():
        plan = batch_plan(config, examples, mesh, train=False)
        loading.first_and_last(
            examples,
            plan,
            mesh,
            micro_batches=config.update_every,  # of each batch, as in training
            collate=collate_fn,
        )
        if not any(tag != entities.OUTSIDE for tags in examples.gold for tag in tags):
            raise InputError(
                f"{data.task.name}'s split {split} has no entities, all its tags are O: its F1 "
                "would be 0 whatever is predicted"
            )


def evaluate(
    eval_fn: Callable, state: State, data: Data, config: Config, mesh: Mesh
) -> dict[str, float]:
    """Returns the scores of the entities, and the mean loss of the words.

    Args:
        eval_fn: the compiled eval_step.
    """
    metrics = {}
    collate_fn = partial(collate, architectures.limits(state.model))
    state.model.eval()
    for examples in data.eval.values():
        plan = batch_plan(config, examples, mesh, train=False)
        loader = loading.parallel_loader(
            examples,
            plan,
            mesh,
            train=False,
            micro_batches=config.update_every,  # of each batch, as in training
            collate=collate_fn,
            workers=config.workers,
        )
        with loader:
            batches = [eval_fn(state, batch, config, mesh) for batch in loader]
        outputs = [batch["classes"] for batch in batches] + [batch["loss"] for batch in batches]
        outputs = device.read(outputs)  # in one transfer
        classes = outputs[: len(batches)]
        losses = outputs[len(batches) :]

        predicted = predicted_tags(examples, evaluation_order(plan), classes, data.task)
        metrics |= score(examples.gold, predicted, data.task)
        metrics["loss"] = torch.cat(losses).sum().item() / examples.words.sum().item()
    state.model.train()
    return metrics


def predicted_tags(
    examples: windows.Encoded, order: np.ndarray, classes: list[Tensor], task: tagging.Task
) -> list[list[str]]:
    """Returns the predicted tags of the words of each sentence.

    Args:
        order: see `evaluation_order`.
        classes: of the tokens, [B, T] of each batch.
    """
    of_windows = [np.empty(0, np.int32)] * len(examples)
    rows = itertools.chain.from_iterable(batch.numpy() for batch in classes)
    for index, row in zip(order.tolist(), rows, strict=True):
        if index >= 0:
            of_windows[index] = examples.of_words(index, row)
    names = task.labels
    tags = []
    for numbers in examples.of_sentences(of_windows):
        tags.append([names[number] for number in numbers.tolist()])
    return tags


def score(
    gold: list[list[str]], predicted: list[list[str]], task: tagging.Task
) -> dict[str, float]:
    """Returns the metrics of predicted tags, but for the loss, in the order of `metric_names`."""
    scores = entities.score(gold, predicted)
    overall = scores.overall
    metrics = {
        "f1": overall.f1,
        "precision": overall.precision,
        "recall": overall.recall,
        "accuracy": scores.accuracy,
    }
    for kind in task.types:
        metrics[f"f1_{kind}"] = scores.by_type.get(kind, entities.Counts()).f1
    return metrics


def metric_names(data: Data) -> list[str]:
    """Returns the names of what `evaluate` returns, in its order."""
    of_types = [f"f1_{kind}" for kind in data.task.types]
    return ["f1", "precision", "recall", "accuracy", *of_types, "loss"]


def evaluation_order(plan: batching.Plan) -> np.ndarray:
    """Returns the index of the example in each row that an evaluation's loader yields, in its
    order; -1 for a row of padding.

    The loader takes the batches as `plan.epoch(rng=None)` has them, and cuts each into
    micro-batches from its first row to its last.
    """
    batches = plan.epoch(rng=None)  # without a generator: the order of an evaluation
    return np.concatenate([indices for indices, _ in batches])


def export(folder: str, state: State, data: Data, config: Config, mesh: Mesh) -> None:
    """Writes what transformers' `pipeline("token-classification", model=folder)` loads; and
    COLUMNS, which says what the examples of the training were, and how they were evaluated."""
    # All hosts call it; the main one gets the weights.
    weights = checkpoint.to_host(
        state.model.state_dict(), layers=mesh.layers, is_needed=mesh.main_process
    )
    if not mesh.main_process:
        return

    # What make predict does as the evaluation of the run.
    evaluated = {"max_length": config.lengths[-1], "precision": config.precision}
    examples = {**data.task.columns, **evaluated}

    def save(local: str) -> None:
        encoder_files.save(local, state.model, weights, data.tokenizer)
        Path(local, COLUMNS).write_text(json.dumps(examples, indent=1) + "\n")

    files.write_folder(folder, save)


def open_evaluation(config: Config, run: FinishedRun) -> Data:
    """Opens the model of a run's export, and encodes the sentences of --split.

    Raises:
        InputError: the export is not whole; or the sentences have a type of entities that it does
            not have.
    """
    compiled = config.device == "xla"
    exported = encoder_files.open_checkpoint(run.local_export(), "auto", compiled=compiled)
    names = [exported.config.id2label[index] for index in range(exported.config.num_labels)]
    found = sorted({entities.split_tag(name)[1] for name in names} - {""})
    opened = tagging.open_evaluation(
        config.data,
        columns_of(config),
        found,
        splits.wanted(config.split),
        is_own=run.owns(config.data),
        seed=config.seed,
    )

    task = opened.task
    tagger = token_classification.tagger(exported.config, task.labels, exported.source)
    if tagger.head.is_new:
        raise InputError(f"{tagger.head.why_new}; give a run whose export is whole")
    evaluated = encode(opened.eval, exported.tokenizer, config, task)
    return Data(None, evaluated, tagger.model, exported.tokenizer, task)


def evaluate_run(config: Config, mesh: Mesh) -> dict[str, float]:
    """Evaluates the run --evaluate by its export; returns the metrics, as `main` does."""
    run = FinishedRun(config.evaluate)
    data = open_evaluation(config, run)
    check_evaluation(data, config, mesh)
    (examples,) = data.eval.values()
    sentences = len(examples.gold)
    what = f"{sentences:,} sentences of {examples.words.sum():,} words"
    run.announce(mesh, config.data, what, examples)

    state = State(on_device(data.model, mesh), optimizer=None)
    eval_fn = device.compiled(eval_step, mesh, max_graphs=len(config.lengths))
    metrics = evaluate(eval_fn, state, data, config, mesh)
    return run.record(config, mesh, sentences, metrics)


def headline(config: Config, data: Data, plan: batching.Plan, total_steps: int) -> str:
    """Returns what a run of `total_steps` says first."""
    lengths = "|".join(map(str, config.lengths))
    types_found = data.task.found  # a phrase with its comma, or ""
    sources = splits.said(data.train, *data.eval.values())
    return (
        f"{config.model} on {data.task.name}: {types_found}{len(data.train.gold):,} sentences "
        f"({data.train.split:,} of them longer than {config.lengths[-1]} tokens, in windows) "
        f"in batches of {config.batch_size} x {lengths} with {plan.padding:.1%} padding, "
        f"{total_steps:,} steps ({config.epochs:g} epochs){sources}"
    )


def main(config: Config) -> dict[str, float]:
    """Fine-tunes, evaluates and exports, or evaluates a finished run; returns the final metrics."""
    config = validate(resolve_config(config, EVALUATE_FLAGS))
    mesh = device.setup(
        config.seed,
        config.precision,
        config.strict,
        config.device,
        config.layout,
        safe_forms=config.safe_forms,
    )
    if config.evaluate:
        return evaluate_run(config, mesh)

    # ---- the data --------------------------------------------------------------------------------
    data = open_data(config)
    if learns_words(config):
        check_words(data.tokenizer, mesh)
    plan = batch_plan(config, data.train, mesh, train=True)
    steps_per_epoch = loading.steps_per_epoch(
        data.train, plan, mesh, micro_batches=config.update_every
    )
    total_steps = math.ceil(config.epochs * steps_per_epoch)
    check_evaluation(data, config, mesh)

    # ---- the run's folder ------------------------------------------------------------------------
    suffix = "-synthetic" if config.data == "synthetic" else ""
    run = Run(
        config,
        mesh,
        name=f"{config.model}-{data.task.name}{suffix}",
        headline=headline(config, data, plan, total_steps),
        may_differ=MAY_CHANGE,
        sources=splits.sources_of(data.train, *data.eval.values()),
        total_steps=total_steps,
        metrics=metric_names(data),
    )
    if run.finished:
        return run.print_summary()
    if data.head_message:
        run.message(data.head_message)

    # ---- the model and its steps -----------------------------------------------------------------
    state = build(config, data, mesh)
    start = run.resume(state.model, state.optimizer, examples=len(data.train), keep=config.keep)
    max_graphs = len(plan.shapes)  # an evaluation's plan has the same lengths
    if config.update_every > 1:
        train_fn = accumulate.AccumulatedStep(
            forward, update, state, ("loss",), mesh, per="words", max_graphs=max_graphs
        )
    else:
        train_fn = accumulate.SeededStep(train_step, mesh, max_graphs=max_graphs)
    eval_fn = device.compiled(eval_step, mesh, max_graphs=max_graphs)
    state.model.train()

    def evaluation(step: int) -> dict[str, float]:
        """Evaluates the state after `step`, and records it."""
        with run.pause():
            metrics = evaluate(eval_fn, state, data, config, mesh)
        run.evaluation(step, **metrics)
        return metrics

    # ---- the loop --------------------------------------------------------------------------------
    loader = loading.parallel_loader(
        data.train,
        plan,
        mesh,
        train=True,
        seed=config.seed,
        start=start,
        stop=total_steps,
        micro_batches=config.update_every,  # cuts a batch
        update_every=config.update_every,  # yields those of an update together
        collate=partial(collate, architectures.limits(state.model)),
        workers=config.workers,
    )
    eval_every = config.eval_every or steps_per_epoch
    # All hosts of a pod agree on a stop signal, about every ten micro-batches.
    stop_every = max(10 // config.update_every, 1)  # in updates
    with run.training(loader, stop_every=stop_every):
        metrics = {}  # of the last evaluation in this start
        if run.evaluation_due:  # the run ended between a checkpoint and its evaluation
            metrics = evaluation(start)

        for step, micro_batches in enumerate(run.batches(loader), start + 1):
            lr = learning_rate(config, step - 1, total_steps)
            device.set_lr(state.optimizer, lr)
            step_metrics = train_fn(state, micro_batches, config, mesh)

            if step == 1 or step % config.log_every == 0 or step == total_steps:
                run.log(
                    step,
                    # On average: the last batch of an epoch is not full.
                    examples=step * len(data.train) // steps_per_epoch,
                    input_wait=loader.input_wait(),
                    lr=lr,
                    **step_metrics,
                )
            evaluates = step % eval_every == 0 or step == total_steps
            is_due = config.save_every > 0 and step % config.save_every == 0
            run.checkpoint(step, due=is_due, evaluates=evaluates)
            if evaluates:
                metrics = evaluation(step)

        # ---- the end -----------------------------------------------------------------------------
        run.checkpoints.wait()
        metrics = run.load_best() or metrics  # with --best: of the state that it has loaded
        if not metrics:  # the run ended after the last step, before the export
            metrics = evaluate(eval_fn, state, data, config, mesh)
        export(f"{run.path}/export", state, data, config, mesh)
        run.finish(metrics)
    return metrics


PRESETS = {
    "full": ("fine-tuning by the model's recipe; needs --data", Config()),
    "tiny": ("a small network and a synthetic task: a minute on a CPU", TINY),
}

if __name__ == "__main__":
    cli.run(main, PRESETS)
