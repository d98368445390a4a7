"""GLUE: fine-tuning BERT, DistilBERT, RoBERTa, XLNet, or one of 30 more encoders, on any of the
nine tasks.

paper     Wang et al. 2019, GLUE (arXiv:1804.07461); recipes with their sources: models/encoders
data      a folder of GLUE's own TSV files, the hub id nyu-mll/glue, or a folder of `datasets`
run       python -m train.glue tiny                                     a synthetic task: a minute
                                                                        on two CPU cores
          python -m train.glue full --data nyu-mll/glue --task mrpc     on a TPU VM
result    of published checkpoints: not run yet (they cannot be had here); small real data:
          docs/results.md
"""

if __name__ == "__main__" and not __package__:  # by its path: the imports below are not found
    raise SystemExit("error: in the project's folder run it as a module: python -m train.glue tiny")

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from data import batching, glue, splits, vocabulary
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
from train.common import accumulate, checkpoint, cli, device, files, loading
from train.common.mesh import WHOLE, Layout, Mesh
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    model: Literal[encoders.NAMES] = "bert"  # auto: the architecture of --checkpoint (docs/data.md)
    task: Literal[tuple(glue.TASKS)] = "mrpc"  # of GLUE
    data: str = ""  # folder or URL of TSV files or of `datasets`, hub id, or "synthetic"
    checkpoint: str = ""  # hub id, or folder with configuration, weights, tokenizer; "": the usual
    pretrained: bool = True  # False: of --checkpoint only configuration and tokenizer; new weights
    labels: str = ""  # classes in the order of the head of --checkpoint: a,b,…; if it has no names
    lengths: tuple[int, ...] = (32, 64, 128)  # tokens: a compiled shape each; longer rows are cut
    group_by_length: bool = False  # batches of like length: less padding, but they learn worse
    batch_size: int = 32  # sequences per update, over all devices
    update_every: int = 1  # gradient-accumulation steps: micro-batches that a batch is cut into
    epochs: float | None = None  # passes over the data; None: the model's recipe, as for the next 3
    lr: float | None = None  # peak learning rate
    warmup: float | None = None  # share of the steps in which the rate rises; then it falls to 0
    weight_decay: float | None = None  # of AdamW; not of biases and norms
    clip: float = 1.0  # largest norm of all gradients
    precision: Literal["bfloat16", "float32", "fast_float32"] = "bfloat16"  # train/common/device.py
    device: Literal["xla", "cpu", "cuda"] = "xla"  # xla: a TPU or XLA on CPUs; else plain PyTorch
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


TINY = Config(**cli.TRIAL, task="sst2", lengths=(16, 32), epochs=6, lr=2e-3, weight_decay=0.01)

# Fields that a resumed run may change: none of these touches a number.
FREE = ("workers", "log_every", "save_every", "strict", "layout", "safe_forms")
# A run from before this field was there has another order of examples.
REQUIRED = ("group_by_length",)
ADAM_EPS = 1e-6  # as in all four papers
SYNTHETIC_WORDS = 400  # a trial's largest vocabulary
SYNTHETIC_INIT = 0.05  # the spread of a trial's new weights
ROWS_MULTIPLE = 8  # batches are laid out for 1 to 8 chips in the same way


class Data(NamedTuple):
    """What a run reads."""

    train: glue.Encoded
    eval: dict[str, glue.Encoded]  # by split
    model: nn.Module  # on the host
    tokenizer: Any
    head: str = ""  # what a start says of the head of a checkpoint


class State(NamedTuple):
    """What a step works on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def learning_rate(config: Config, step: int, total: int) -> float:
    """Returns the rate at 0-based `step`: linear warm-up, then linearly to 0."""
    warmup = config.warmup * total
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    return config.lr * (total - step) / max(total - warmup, 1)


def validate(config: Config) -> Config:
    """Returns the config with the model's recipe where a field is None; raises InputError where a
    value is outside its range."""
    recipe = encoders.record(config.model).fine_tuning
    for name in ("epochs", "lr", "warmup", "weight_decay"):
        if getattr(config, name) is None:
            config = replace(config, **{name: getattr(recipe, name)})

    cli.at_least(config, 1, "batch_size", "update_every", "log_every", "keep")
    cli.at_least(config, 0, "lr", "weight_decay", "eval_every", "save_every", "seed")
    cli.at_least(config, -1, "workers")
    cli.at_least(config, 0, "warmup", below=1)
    cli.at_least(config, 0, "clip", above=True)
    cli.at_least(config, 0, "epochs", above=True, below=math.inf)
    rising = list(config.lengths) == sorted(set(config.lengths))
    if not config.lengths or not rising or config.lengths[0] < 8:
        raise InputError(f"--lengths are {config.lengths}; they must rise and be at least 8")

    cli.need_data(config, "GLUE's folder or nyu-mll/glue")
    if not config.checkpoint and config.data != "synthetic":
        if not recipe.checkpoint:
            raise InputError(f"--checkpoint is missing: --model {config.model} needs one")
        config = replace(config, checkpoint=recipe.checkpoint)
    if config.labels:
        check_labels(config)
    return config


def check_labels(config: Config) -> None:
    """Raises InputError where --labels cannot name the classes of a checkpoint's head."""
    given = f"--labels is {config.labels}"
    labels = glue.TASKS[config.task].labels
    if not config.checkpoint or not config.pretrained:
        raise InputError(f"{given}; it is for the head of a --checkpoint with its weights")
    if not labels:
        raise InputError(f"{given}; {config.task} is a regression and has no classes")
    heads.parse_labels(config.labels, labels)


def open_data(config: Config) -> Data:
    """Opens the model and its tokenizer, and encodes the task's splits with it."""
    task = glue.TASKS[config.task]
    texts = {}
    for split in ("train", *task.evaluation):
        texts[split] = glue.read(config.data, config.task, split, config.seed)

    source = None
    if config.checkpoint:
        folder = files.local_folder(config.checkpoint)
        compiled = config.device == "xla"
        opened = encoder_files.open_checkpoint(folder, config.model, compiled=compiled)
        settings = opened.config
        tokenizer = opened.tokenizer
        if config.pretrained:
            source = opened.source
    else:  # a trial
        words = [*texts["train"].first, *(texts["train"].second or [])]
        kind = encoders.record(config.model).tokenizer
        tokenizer = vocabulary.learn(words, kind, SYNTHETIC_WORDS)
        settings = encoders.configuration(config.model, "tiny", tokenizer, config.lengths[-1])
        settings.initializer_range = SYNTHETIC_INIT

    stated = heads.parse_labels(config.labels, task.labels) if config.labels else ()
    found = classification.classifier(settings, task.labels, source, stated)
    positions = architectures.positions(found.model)
    if config.lengths[-1] > positions:
        longest = f"--lengths go up to {config.lengths[-1]}"
        raise InputError(f"{longest}; the model has {positions} positions")
    if config.lr == 0 and found.head.untrained:
        raise InputError(found.head.untrained)

    sets = {}
    for split, text in texts.items():
        sets[split] = glue.Encoded(text, tokenizer, config.lengths[-1])
    said = found.head.said
    if found.head.is_new and config.lr == 0:
        said += "; --lr 0 does not train it"
    return Data(sets.pop("train"), sets, found.model, tokenizer, said)


def batches(config: Config, examples: glue.Encoded, mesh: Mesh, train: bool) -> batching.Plan:
    """Returns which examples share a batch.

    In training any do, padded to the shortest of --lengths that holds the longest of them; in
    evaluation those of like length. Where shapes may vary, they are padded no further.
    """
    sizes = config.lengths
    if mesh.shapes_may_vary:
        sizes = range(1, config.lengths[-1] + 1)
    by_length = config.group_by_length or not train
    return batching.Shuffled(examples.lengths, config.batch_size, sizes, by_length)


def collate(limits: architectures.Limits, batch: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Returns a batch as tensors; checks on the host what it indexes: on a device a wrong number
    would read another row of a table."""
    tensors = loading.as_tensors(batch)
    limits.check(tensors)
    return tensors


def build(config: Config, data: Data, mesh: Mesh) -> State:
    """Moves the model to the device and makes its optimizer, whose state exists from the start."""
    layers.use_forms(clamp_weights=not mesh.safe_forms)
    rows_multiple = 0
    if mesh.kind.startswith("TPU"):
        rows_multiple = math.lcm(ROWS_MULTIPLE, mesh.num_devices)
    model = encoder_layers.fast_layers(data.model, rows_multiple)
    model = device.to_device(model, mesh, encoders.rules)

    groups = architectures.parameter_groups(model, config.weight_decay)
    betas = (0.9, encoders.record(config.model).fine_tuning.beta2)
    optimizer = torch.optim.AdamW(groups, config.lr, betas, ADAM_EPS, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    return State(model, optimizer)


def forward(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns sums over the examples of a batch or micro-batch, which has data/glue.py's entries;
    padding does not count."""
    with mesh.autocast():
        logits = classification.logits(state.model, batch)
    losses = classification.losses(logits, batch["labels"])
    return {"loss": (losses * batch["mask"]).sum(), "examples": batch["mask"].sum()}


def train_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Updates once on a batch; returns the mean loss and the gradients' norm."""
    sums = forward(state, batch, config, mesh)
    loss = sums["loss"] / sums["examples"]
    loss.backward()
    metrics = {"loss": loss.detach()} | update(state, config)
    state.optimizer.zero_grad(set_to_none=True)
    return metrics


def update(state: State, config: Config) -> dict[str, Tensor]:
    """Updates the parameters from their gradients; returns the norm of these."""
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.clip)
    state.optimizer.step()
    return {"gradient_norm": norm.detach()}


def eval_step(state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh) -> Tensor:
    """Returns logits [B, labels], on every device and so on every host."""
    with torch.no_grad(), mesh.autocast():
        logits = classification.logits(state.model, batch)
    logits = logits.float()
    device.replicate(logits, mesh)
    return logits


def check_evaluation(data: Data, config: Config, mesh: Mesh) -> None:
    """Reads the first and the last examples of each split that is evaluated, and computes the
    metrics of its labels, as if all were predicted; raises InputError where an evaluation would."""
    checked = partial(collate, architectures.limits(data.model))
    for split, examples in data.eval.items():
        plan = batches(config, examples, mesh, train=False)
        loading.first_and_last(examples, plan, mesh, split=config.update_every, collate=checked)
        try:
            glue.score(config.task, examples.labels, examples.labels)
        except ValueError as error:
            what = f"the labels of {config.task}'s split {split} cannot be evaluated"
            raise InputError(f"{what}: {error}") from error


def evaluate(
    step, state: State, sets: dict[str, glue.Encoded], config: Config, mesh: Mesh
) -> dict[str, float]:
    """Returns the task's metrics and the mean loss over each split; `step` is the compiled
    eval_step."""
    metrics = {}
    checked = partial(collate, architectures.limits(state.model))
    state.model.eval()
    for split, examples in sets.items():
        plan = batches(config, examples, mesh, train=False)
        loader = loading.parallel_loader(
            examples,
            plan,
            mesh,
            train=False,
            split=config.update_every,
            collate=checked,
            workers=config.workers,
        )
        scores = {}
        with loader:
            for number, batch in enumerate(loader):
                scores[str(number)] = step(state, batch, config, mesh)

        on_host = checkpoint.to_host(scores)
        logits = torch.cat(list(on_host.values()))
        order = np.concatenate([indices for indices, _ in plan.epoch(None)])
        is_example = order >= 0  # the others are padding
        logits = logits[is_example]
        labels = torch.from_numpy(examples.labels[order[is_example]])

        loss = classification.losses(logits, labels).sum() / len(labels)
        is_regression = logits.shape[1] == 1
        predictions = logits[:, 0] if is_regression else logits.argmax(1)
        values = glue.score(config.task, predictions.numpy(), labels.numpy())
        values["loss"] = loss.item()
        prefix = "mismatched_" if split.endswith("mismatched") else ""
        for name, value in values.items():
            metrics[prefix + name] = value
    state.model.train()
    return metrics


def export(folder: str, state: State, data: Data, mesh: Mesh) -> None:
    """Writes what transformers' `pipeline("text-classification", model=folder)` loads."""
    weights = checkpoint.to_host(state.model.state_dict(), mesh.layers, mesh.main_process)
    if not mesh.main_process:
        return

    def save(local: str) -> None:
        encoder_files.save(local, state.model, weights, data.tokenizer)

    files.write_folder(folder, save)


def headline(config: Config, data: Data, plan: batching.Plan, total: int) -> str:
    """Returns what a run of `total` steps says first."""
    cut = f"{data.train.truncated:,} cut to {config.lengths[-1]} tokens"
    examples = f"{len(data.train):,} examples ({cut})"
    lengths = "|".join(map(str, config.lengths))
    shapes = f"in batches of {config.batch_size} x {lengths} with {plan.padding:.1%} padding"
    said = splits.said(data.train, *data.eval.values())
    steps = f"{total:,} steps ({config.epochs:g} epochs){said}"
    return f"{config.model} on {config.task}: {examples} {shapes}, {steps}"


def main(config: Config) -> dict[str, float]:
    """Fine-tunes, evaluates and exports; returns the final metrics, those of MNLI's second split as
    mismatched_…."""
    config = validate(config)
    mesh = device.setup(
        config.seed,
        config.precision,
        config.strict,
        config.device,
        config.layout,
        safe_forms=config.safe_forms,
    )
    varies = encoders.record(config.model).tokenizer in vocabulary.VARYING
    if mesh.process_count > 1 and varies and not config.checkpoint:
        trial = f"the trial of --model {config.model} is for one host"
        raise InputError(f"{trial}, not {mesh.process_count}; give --checkpoint")

    data = open_data(config)
    plan = batches(config, data.train, mesh, train=True)
    per_epoch = loading.steps_per_epoch(data.train, plan, mesh, micro_batches=config.update_every)
    total = math.ceil(config.epochs * per_epoch)

    suffix = "-synthetic" if config.data == "synthetic" else ""
    check_evaluation(data, config, mesh)
    run = Run(
        config,
        mesh,
        name=f"{config.model}-{config.task}{suffix}",
        headline=headline(config, data, plan, total),
        free=FREE,
        required=REQUIRED,
        total_steps=total,
    )
    if run.finished:
        return run.print_summary()
    if data.head:
        run.message(data.head)

    state = build(config, data, mesh)
    start = run.resume(state.model, state.optimizer, examples=len(data.train), keep=config.keep)
    shapes = len(plan.shapes)
    train = accumulate.SeededStep(train_step, mesh, shapes)
    if config.update_every > 1:
        train = accumulate.AccumulatedStep(
            forward, update, state, ("loss",), mesh, per="examples", max_graphs=shapes
        )
    eval_fn = device.compiled(eval_step, mesh, shapes)
    state.model.train()

    def evaluation(step: int) -> dict[str, float]:
        """Evaluates the state after `step`, and records it."""
        with run.pause():
            metrics = evaluate(eval_fn, state, data.eval, config, mesh)
        run.evaluation(step, **metrics)
        return metrics

    loader = loading.parallel_loader(
        data.train,
        plan,
        mesh,
        train=True,
        seed=config.seed,
        start=start,
        stop=total,
        split=config.update_every,
        update_every=config.update_every,
        collate=partial(collate, architectures.limits(state.model)),
        workers=config.workers,
    )
    with run.training(loader, stop_every=max(10 // config.update_every, 1)):
        metrics = {}
        if run.evaluation_due:  # the run ended between a checkpoint and its evaluation
            metrics = evaluation(start)

        for step, batch in enumerate(loader, start + 1):
            lr = learning_rate(config, step - 1, total)
            device.set_lr(state.optimizer, lr)
            step_metrics = train(state, batch, config, mesh)

            if step == 1 or step % config.log_every == 0 or step == total:
                run.log(
                    step,
                    examples=step * len(data.train) // len(plan),
                    input_wait=loader.input_wait(),
                    lr=lr,
                    **step_metrics,
                )
            evaluates = step % (config.eval_every or len(plan)) == 0 or step == total
            due = config.save_every > 0 and step % config.save_every == 0
            run.checkpoint(step, due=due, evaluates=evaluates)
            if evaluates:
                metrics = evaluation(step)

        run.checkpoints.wait()
        if not metrics:  # the run ended after the last step, before the export
            metrics = evaluate(eval_fn, state, data.eval, config, mesh)
        export(f"{run.path}/export", state, data, mesh)
        run.finish(metrics)
    return metrics


PRESETS = {
    "full": ("fine-tuning by the model's recipe; needs --data", Config()),
    "tiny": ("a small network and a synthetic task: a minute on a CPU", TINY),
}

if __name__ == "__main__":
    cli.run(main, PRESETS)
