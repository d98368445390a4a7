"""GLUE: fine-tuning BERT, DistilBERT, RoBERTa, XLNet, or one of 30 more encoders, on any of the
nine tasks, or on your own sentences.

paper     Wang et al. 2019, GLUE (arXiv:1804.07461); recipes with their sources: models/encoders
data      a folder of GLUE's own TSV files, the Hugging Face hub id nyu-mll/glue, or a folder that
          Hugging Face's `datasets` saved; of your own: CSV, TSV, JSON lines, parquet, see
          data/own_text.py
run       python -m train.glue tiny                                     a synthetic task: a minute
                                                                        on two CPU cores
          python -m train.glue full --data nyu-mll/glue --task mrpc     on a TPU VM
          python -m train.glue full --data reviews.csv --text review --label stars
result    of published checkpoints: not run yet (they could not be downloaded here); small real
          data: docs/results.md
"""

if __name__ == "__main__" and not __package__:  # by its path: the imports below are not found
    raise SystemExit("error: in the project's folder run it as a module: python -m train.glue tiny")

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

from data import batching, glue, own_text, sentences, splits, targets, vocabulary
from errors import InputError
from models import (
    architectures,
    classification,
    encoder_files,
    encoder_layers,
    encoders,
    heads,
    layers,
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
    task: Literal[tuple(glue.TASKS)] | None = None  # of GLUE; None: mrpc, or your own by --text
    data: str = ""  # file, folder or URL, of text or saved by HF datasets; HF hub id; "synthetic"
    text: tuple[str, ...] = ()  # of your own data: the column of sentences, or two of pairs
    label: str = ""  # of your own data: the column of labels
    objective: Literal[targets.OBJECTIVES] | None = None  # what your labels are; None: classes
    separator: str = ""  # between the labels of a text, for --objective multilabel
    evaluate: str = ""  # a finished run's folder: nothing is trained, its export is evaluated
    split: str = ""  # of --data, with --evaluate: train, valid, test; "": as in training
    checkpoint: str = ""  # HF hub id or folder; "new": new weights and words; "": the recipe's
    pretrained: bool = True  # False: of --checkpoint only configuration and tokenizer; new weights
    labels: str = ""  # of --checkpoint's head: its classes in order, a,b,…; where it names none
    lengths: tuple[int, ...] = (32, 64, 128)  # tokens: a compiled shape each; longer rows are cut
    group_by_length: bool = False  # batches of like length: less padding, but less accurate
    batch_size: int | None = None  # sequences per update, over all devices; None: model's recipe
    update_every: int = 1  # gradient-accumulation steps: micro-batches that a batch is cut into
    epochs: float | None = None  # passes over the data; None: the recipe
    lr: float | None = None  # peak learning rate; None: the recipe
    warmup: float | None = None  # share of steps that lr rises in; then it falls to 0; None: recipe
    weight_decay: float | None = None  # of AdamW; not of biases and norms; None: the recipe
    clip: float | None = None  # largest norm of all gradients; inf: not clipped; None: the recipe
    best: str | None = None  # exports the best by accuracy, -loss, …; "": the last; None: recipe
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
    task="sst2",
    lengths=(16, 32),
    batch_size=32,
    epochs=6,
    lr=2e-3,
    weight_decay=0.01,
    clip=1.0,
)

# Fields that a resumed run may change: these do not change the trained weights. keep does not
# either, but has never been among them: a run with another --keep is another run.
MAY_CHANGE = ("workers", "log_every", "save_every", "strict", "layout", "safe_forms")
# Fields that a resumed run's config.json must have. Before group_by_length existed, runs had
# another order of examples.
REQUIRED = ("group_by_length",)
# Flags that may be given with --evaluate; all others are the run's. They change no number beyond
# rounding.
EVALUATE_FLAGS = ("batch_size", "update_every")
COLUMNS = "columns.json"  # of an export: what `make predict` needs to know of the training
# Fields whose None is the recipe's value.
OF_RECIPE = ("batch_size", "epochs", "lr", "warmup", "weight_decay", "clip", "best")
ADAM_EPS = 1e-6  # of BERT's and DistilBERT's code, and in RoBERTa's and XLNet's papers
SYNTHETIC_SIZE = "tiny"  # a trial's network
SYNTHETIC_WORDS = 400  # a trial's largest vocabulary
SYNTHETIC_INIT = 0.05  # the spread of a trial's new weights

# Numbers of a regression beyond this are learnt slowly: a user labelled sentences with millions,
# and the predictions were 0.1.
FAR_FROM_0 = 10.0

# New weights: a network and a vocabulary that a few thousand sentences train in a minute.
NEW = "new"  # as --checkpoint
NEW_SIZE = "tiny"
NEW_WORDS = 8000  # the largest vocabulary
NEW_RECIPE = FineTuning(
    source="new weights need a higher rate and more epochs (tried on 800 to 5,000 sentences)",
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

    train: sentences.Encoded | None  # None: a finished run is evaluated
    eval: dict[str, sentences.Encoded]  # by split
    model: nn.Module  # on the host
    tokenizer: PreTrainedTokenizerBase
    # What the user should know of the weights that training starts from, and of what they learn.
    head_message: str = ""
    task: sentences.Task | None = None  # what the sentences are labelled with


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
    """Returns the published recipe: that of the model for a task of GLUE; the model's alone for the
    user's own sentences and for trials, of which none is published; or our own for new weights."""
    if config.checkpoint == NEW:
        return NEW_RECIPE
    recipe = encoders.by_name(config.model).fine_tuning
    if config.text or config.data == "synthetic":
        return recipe
    return recipe.of_task(config.task)


def with_recipe(config: Config) -> Config:
    """Returns the config with a task, and with the recipe's numbers where a field is None."""
    if not config.text:
        config = replace(config, task=config.task or "mrpc")
    recipe = recipe_of(config)
    for name in OF_RECIPE:
        if getattr(config, name) is None:
            config = replace(config, **{name: getattr(recipe, name)})
    return config


def validate(config: Config) -> Config:
    """Returns the config with the model's recipe where a field is None; raises InputError where a
    value is outside its range."""
    config = with_recipe(config)
    cli.at_least(config, 1, "batch_size", "update_every", "log_every", "keep")
    cli.at_least(config, 0, "lr", "weight_decay", "eval_every", "save_every", "seed", "patience")
    cli.at_least(config, -1, "workers")
    cli.at_least(config, 0, "warmup", below=1)
    cli.at_least(config, 0, "clip", above=True)
    cli.at_least(config, 0, "epochs", above=True, below=math.inf)
    rising = list(config.lengths) == sorted(set(config.lengths))
    if not config.lengths or not rising or config.lengths[0] < 8:
        raise InputError(f"--lengths are {config.lengths}; they must rise and be at least 8")

    cli.need_data(config, "GLUE's folder or nyu-mll/glue, or a file with --text and --label")
    check_columns(config)
    if config.text:
        config = replace(config, objective=config.objective or "classes")
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


def check_columns(config: Config) -> None:
    """Raises InputError where the flags of the user's own data do not fit together."""
    if not config.text:
        for name in ("label", "objective", "separator"):
            if getattr(config, name):
                raise InputError(
                    f"--{name} is {getattr(config, name)}; it is for data of your own, "
                    "whose column of sentences is given by --text"
                )
        return

    given = f"--text is {' '.join(config.text)}"
    if len(config.text) > 2:
        raise InputError(f"{given}; expected one column of sentences, or two of pairs")
    if not config.label:
        raise InputError(f"{given}, and --label is missing: give the column of the labels")
    columns = [*config.text, config.label]
    if len(set(columns)) < len(columns):
        raise InputError(f"{given} and --label is {config.label}; expected different columns")
    if config.task or config.data == "synthetic":
        other = "--data is synthetic"
        if config.data != "synthetic":
            other = f"--task is {config.task} (the preset tiny has one, full has none)"
        raise InputError(f"{given}, which is for data of your own, but {other}; leave one out")
    if config.separator and config.objective != "multilabel":
        raise InputError(f"--separator is {config.separator}; it is for --objective multilabel")


def open_data(config: Config) -> Data:
    """Opens the splits and the model, and encodes the splits with its tokenizer."""
    if config.text:
        opened = own_text.open_splits(config.data, columns_of(config))
    else:
        opened = glue.open_task(config.data, config.task, config.seed)
    encoder = _open_encoder(config, opened.train)
    tokenizer = encoder.tokenizer
    classifier = _open_classifier(config, opened.task, encoder)

    train = sentences.Encoded(opened.train, tokenizer, config.lengths[-1])
    evaluated = encode(opened.eval, tokenizer, config)

    if config.checkpoint == NEW:
        head_message = _describe_new(config, tokenizer)
    else:
        head_message = classifier.head.message
        # A checkpoint that never had a head may be evaluated untrained, but the user is told.
        if classifier.head.is_new and config.lr == 0:
            head_message += "; --lr 0 does not train it"
    messages = [head_message, _describe_numbers(opened.task, opened.train.labels)]
    head_message = "\n".join(filter(None, messages))
    return Data(train, evaluated, classifier.model, tokenizer, head_message, opened.task)


def _describe_numbers(task: sentences.Task, labels: np.ndarray) -> str:
    """Returns what the user should know of a regression's labels [n] that are far from where a new
    head begins; "" where they are near, or classes."""
    if task.objective != "regression" or np.abs(labels).max() <= FAR_FROM_0:
        return ""
    return (
        f"the numbers of {task.name} go from {labels.min():g} to {labels.max():g}; a new head "
        "begins near 0 and learns slowly what is far from it (STS-B's are 0 to 5): where pearson "
        "stays low or mse high, give them scaled, (number - mean) / deviation"
    )


def columns_of(config: Config) -> own_text.Columns:
    """Returns where the user's own data have text and labels."""
    return own_text.Columns(config.text, config.label, config.objective, config.separator)


def encode(
    examples_of: dict[str, sentences.Examples], tokenizer: PreTrainedTokenizerBase, config: Config
) -> dict[str, sentences.Encoded]:
    """Returns the tokens of each split."""
    longest = config.lengths[-1]
    encoded = {}
    for split, examples in examples_of.items():
        encoded[split] = sentences.Encoded(examples, tokenizer, longest)
    return encoded


@dataclass(frozen=True)
class OpenedEncoder:
    """What a classifier is made of."""

    settings: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    source: encoder_files.Source | None  # of the weights; None: all are new


def _open_encoder(config: Config, train_texts: sentences.Examples) -> OpenedEncoder:
    """Opens --checkpoint. With --checkpoint new, and in a trial, the tokenizer learns the words of
    the training sentences, fewer of them in a trial."""
    if not learns_words(config):
        folder = files.local_folder(config.checkpoint)
        compiled = config.device == "xla"  # refuses architectures that no compiled step can run
        opened = encoder_files.open_checkpoint(folder, config.model, compiled=compiled)
        source = opened.source if config.pretrained else None
        return OpenedEncoder(opened.config, opened.tokenizer, source)

    lines = [*train_texts.first, *(train_texts.second or [])]
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
    return OpenedEncoder(settings, tokenizer, source=None)


def _describe_new(config: Config, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns what the user should know of new weights: their size and their recipe, and why."""
    size = encoders.SIZES[NEW_SIZE]
    return (
        f"new weights: {size.layers} layers of width {size.width}, and {len(tokenizer):,} tokens "
        f"learnt from the training text; --epochs {config.epochs:g} and --lr {config.lr:g}, since "
        f"{NEW_RECIPE.source}"
    )


def _open_classifier(
    config: Config, task: sentences.Task, encoder: OpenedEncoder
) -> classification.Classifier:
    """Returns the model with a head for the task's labels.

    Raises:
        InputError: --lengths exceed its positions; or --labels are not the task's; or, with --lr 0,
            which evaluates a checkpoint as it is, the checkpoint's own head does not fit the task's
            labels or does not name them. (A checkpoint without any head is allowed.)
    """
    if config.labels and task.objective == "regression":
        raise InputError(
            f"--labels is {config.labels}; {task.name} is a regression and has no classes"
        )
    stated = heads.parse_labels(config.labels, task.labels) if config.labels else ()
    classifier = classification.classifier(
        encoder.settings, task.labels, encoder.source, stated, task.objective
    )

    positions = architectures.positions(classifier.model)
    if config.lengths[-1] > positions:
        raise InputError(
            f"--lengths go up to {config.lengths[-1]}; the model has {positions} positions"
        )
    if config.lr == 0 and classifier.head.refusal_at_lr_0:
        raise InputError(classifier.head.refusal_at_lr_0)
    return classifier


def check_words(tokenizer: PreTrainedTokenizerBase, mesh: Mesh) -> None:
    """Raises InputError where hosts of a pod have learnt different words."""
    words = repr(sorted(tokenizer.get_vocab().items()))
    checksum = zlib.crc32(words.encode())
    device.same_on_all_hosts(mesh, "the words that each has learnt (their CRC-32)", checksum)


def batch_plan(
    config: Config, examples: sentences.Encoded, mesh: Mesh, train: bool
) -> batching.Plan:
    """Returns which examples share a batch.

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
    limits.check(tensors)
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
    # Chooses, for the whole process, how the layers compute attention, and the last layer for the
    # tokens that are used only. Both compile to faster programs, but some versions of the TPU's
    # compiler crash on them (docs/tpu.md).
    fast_forms = not mesh.safe_forms
    # On TPUs the encoder computes several short rows as one. Rows are joined within each of
    # `packing_parts` equal parts of the batch only, so never with those of another device. 0: no
    # rows are joined.
    packing_parts = 0
    first_tokens = 1
    if mesh.kind.startswith("TPU"):
        packing_parts = math.lcm(PACKING_PARTS, mesh.num_devices)
        # With one token a row, libtpu 0.0.21 no longer fuses norms with products, in all layers:
        # 141.1 instead of 107.4 million cycles of BERT-base's step (research/trials.md).
        first_tokens = layers.SUBLANES
    layers.use_forms(
        clamp_weights=fast_forms,
        used_tokens=fast_forms,
        first_tokens=first_tokens,
    )
    model = encoder_layers.fast_layers(model, packing_parts=packing_parts)
    return device.to_device(model, mesh, encoders.rules)


def forward(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns sums over the examples of a batch or micro-batch of B rows: "loss", and "examples",
    their number. Rows of padding do not count.

    Sums, since micro-batches have unequal numbers of examples: who calls it divides by "examples".

    Args:
        batch: "input_ids", "attention_mask" and "token_type_ids" [B, T]; "labels" [B], or, with
            --objective multilabel, [B, labels]; and "mask" [B], 0 for a row of padding.
    """
    with mesh.autocast():
        logits = classification.compute_logits(state.model, batch)
    losses = classification.compute_losses(logits, batch["labels"])
    return {"loss": (losses * batch["mask"]).sum(), "examples": batch["mask"].sum()}


def train_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Updates once on a batch; returns the mean loss and the gradients' norm."""
    sums = forward(state, batch, config, mesh)
    loss = sums["loss"] / device.mean_over_processes(sums["examples"])
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


def eval_step(state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh) -> Tensor:
    """Returns the logits [B, labels] of the whole batch: every host can read all of them."""
    with torch.no_grad(), mesh.autocast():
        logits = classification.compute_logits(state.model, batch)
    return device.whole_batch(logits.float(), mesh)


def check_evaluation(data: Data, config: Config, mesh: Mesh) -> None:
    """Reads the first and the last examples of each split that is evaluated, and scores its labels
    against themselves; raises InputError where an evaluation would."""
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
        try:
            data.task.check(examples.labels)
        except ValueError as error:
            raise InputError(
                f"the labels of {data.task.name}'s split {split} cannot be evaluated: {error}"
            ) from error


def evaluate(
    eval_fn: Callable, state: State, data: Data, config: Config, mesh: Mesh
) -> dict[str, float]:
    """Returns the task's metrics and the mean loss of each split.

    Args:
        eval_fn: the compiled eval_step.
    """
    metrics = {}
    collate_fn = partial(collate, architectures.limits(state.model))
    state.model.eval()
    for split, examples in data.eval.items():
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
            logits_of_batches = [eval_fn(state, batch, config, mesh) for batch in loader]
        logits = torch.cat(device.read(logits_of_batches))

        indices = evaluation_order(plan)
        is_example = indices >= 0  # the others are padding
        labels = torch.from_numpy(examples.labels[indices[is_example]])

        for name, value in task_metrics(data.task, logits[is_example], labels).items():
            metrics[prefix_of(split) + name] = value
    state.model.train()
    return metrics


def prefix_of(split: str) -> str:
    """Returns what the names of a split's metrics begin with. MNLI alone has two splits."""
    return "mismatched_" if split.endswith("mismatched") else ""


def metric_names(data: Data) -> list[str]:
    """Returns the names of what `evaluate` returns, in its order."""
    names = []
    for split in data.eval:
        names += [prefix_of(split) + name for name in (*data.task.metrics, "loss")]
    return names


def evaluation_order(plan: batching.Plan) -> np.ndarray:
    """Returns the index of the example in each row that an evaluation's loader yields, in its
    order; -1 for a row of padding.

    The loader takes the batches as `plan.epoch(rng=None)` has them, and cuts each into
    micro-batches from its first row to its last.
    """
    batches = plan.epoch(rng=None)  # without a generator: the order of an evaluation
    return np.concatenate([indices for indices, _ in batches])


def task_metrics(task: sentences.Task, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns a task's metrics and the mean loss of logits [n, labels], or [n, 1] of a
    regression."""
    metrics = task.score(logits.numpy(), labels.numpy())
    loss = classification.compute_losses(logits, labels).sum() / len(labels)
    metrics["loss"] = loss.item()
    return metrics


def export(folder: str, state: State, data: Data, config: Config, mesh: Mesh) -> None:
    """Writes what transformers' `pipeline("text-classification", model=folder)` loads; and
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
    """Opens the model of a run's export, and encodes the examples of --split.

    Raises:
        InputError: the export is not whole; or the examples have a class that it does not have.
    """
    compiled = config.device == "xla"
    exported = encoder_files.open_checkpoint(run.local_export(), "auto", compiled=compiled)
    split = splits.wanted(config.split)
    if config.text:
        names = [exported.config.id2label[index] for index in range(exported.config.num_labels)]
        is_own = run.owns(config.data)
        opened = own_text.open_evaluation(config.data, columns_of(config), names, split, is_own)
    else:
        opened = glue.open_evaluation(config.data, config.task, split, config.seed)

    task = opened.task
    classifier = classification.classifier(
        exported.config, task.labels, exported.source, objective=task.objective
    )
    if classifier.head.is_new:
        raise InputError(f"{classifier.head.why_new}; give a run whose export is whole")
    evaluated = encode(opened.eval, exported.tokenizer, config)
    return Data(None, evaluated, classifier.model, exported.tokenizer, task=task)


def evaluate_run(config: Config, mesh: Mesh) -> dict[str, float]:
    """Evaluates the run --evaluate by its export; returns the metrics, as `main` does."""
    run = FinishedRun(config.evaluate)
    data = open_evaluation(config, run)
    check_evaluation(data, config, mesh)
    examples = sum(map(len, data.eval.values()))
    cut = sum(encoded.truncated for encoded in data.eval.values())
    what = f"{examples:,} examples ({cut:,} cut to {config.lengths[-1]} tokens)"
    run.announce(mesh, config.data, what, *data.eval.values())

    state = State(on_device(data.model, mesh), optimizer=None)
    eval_fn = device.compiled(eval_step, mesh, max_graphs=len(config.lengths))
    metrics = evaluate(eval_fn, state, data, config, mesh)
    return run.record(config, mesh, examples, metrics)


def headline(config: Config, data: Data, plan: batching.Plan, total_steps: int) -> str:
    """Returns what a run of `total_steps` says first."""
    lengths = "|".join(map(str, config.lengths))
    labels_found = data.task.found  # a phrase with its comma, or ""
    sources = splits.said(data.train, *data.eval.values())
    return (
        f"{config.model} on {data.task.name}: {labels_found}{len(data.train):,} examples "
        f"({data.train.truncated:,} cut to {config.lengths[-1]} tokens) "
        f"in batches of {config.batch_size} x {lengths} with {plan.padding:.1%} padding, "
        f"{total_steps:,} steps ({config.epochs:g} epochs){sources}"
    )


def main(config: Config) -> dict[str, float]:
    """Fine-tunes, evaluates and exports, or evaluates a finished run; returns the final metrics,
    those of MNLI's second split as mismatched_…."""
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
        required=REQUIRED,
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
            forward, update, state, ("loss",), mesh, per="examples", max_graphs=max_graphs
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
