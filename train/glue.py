"""GLUE: fine-tuning BERT, DistilBERT, RoBERTa, XLNet, or one of 30 more encoders, on any of the nine tasks.

paper     Wang et al. 2019, GLUE (arXiv:1804.07461); recipes with their sources: models/encoders
data      a folder of GLUE's own TSV files, the hub id nyu-mll/glue, or a folder of `datasets`
run       python -m train.glue tiny                                          a minute on two CPU cores, synthetic task
          python -m train.glue full --data nyu-mll/glue --task mrpc          on a TPU VM
result    of published checkpoints: not run yet (they cannot be had here); small real data: docs/results.md
"""

if __name__ == "__main__" and not __package__:  # by its path, from which the imports below are not found
    raise SystemExit("error: in the project's folder run it as a module: python -m train.glue tiny")

import math
from collections import namedtuple
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data import batching, glue, splits, vocabulary
from errors import InputError
from models import architectures, classification, encoder_files, encoder_layers, encoders, heads, layers
from train.common import accumulate, checkpoint, cli, device, files, loading
from train.common.mesh import WHOLE, Layout
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    model: Literal[encoders.NAMES] = "bert"  # architecture; auto: the one of --checkpoint (docs/data.md lists them)
    task: Literal[tuple(glue.TASKS)] = "mrpc"  # of GLUE
    data: str = ""  # folder or URL of TSV files or of `datasets`, hub id, or "synthetic"
    checkpoint: str = ""  # hub id, or folder with configuration, weights and tokenizer; "": the model's usual one
    pretrained: bool = True  # False: of --checkpoint only configuration and tokenizer, with new weights
    labels: str = ""  # classes of --checkpoint in the order of its head, a,b,…, where it has no names for them
    lengths: tuple[int, ...] = (32, 64, 128)  # tokens of a sequence: a compiled shape each; longer ones are cut
    group_by_length: bool = False  # batches of like length: less padding, so faster, but they learn worse
    batch_size: int = 32  # sequences an update, over all devices
    update_every: int = 1  # parts that a batch comes in, where it does not fit into memory
    epochs: float | None = None  # passes over the data; None: the model's recipe, as for the next three
    lr: float | None = None  # peak learning rate
    warmup: float | None = None  # share of the steps in which the learning rate rises; then it falls linearly to 0
    weight_decay: float | None = None  # of AdamW; not of biases and norms
    clip: float = 1.0  # largest norm of all gradients
    precision: Literal["bfloat16", "float32", "fast_float32"] = "bfloat16"  # of the passes, see train/common/device.py
    device: Literal["xla", "cpu", "cuda"] = "xla"  # xla: a TPU or XLA's CPU backend; cpu, cuda: PyTorch on one device
    layout: Layout = WHOLE  # --mesh, --shard-state, --remat: docs/large_models.md
    seed: int = 0  # of new weights, the order of the data and dropout
    workers: int = 1  # processes a host that make batches; -1: one a core, 0: none
    log_every: int = 50  # steps between lines of metrics
    eval_every: int = 0  # steps between evaluations; 0: an epoch
    save_every: int = 0  # steps between checkpoints, besides the one at each evaluation; 0: none
    keep: int = 1  # checkpoints that stay
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes on the usual ones: docs/tpu.md


TINY = Config(**cli.TRIAL, task="sst2", lengths=(16, 32), epochs=6, lr=2e-3, weight_decay=0.01)

# Fields that a resumed run may change: none of these touches a number.
FREE = ("workers", "log_every", "save_every", "strict", "layout", "safe_forms")
REQUIRED = ("group_by_length",)  # a run from before there was this field has another order of examples
ADAM_EPS = 1e-6  # as in all four papers
SYNTHETIC_WORDS, SYNTHETIC_INIT = 400, 0.05  # a trial's largest vocabulary, and the spread of its new weights

# eval: {split: examples}; model: on the host; head: what a start says of the head of a checkpoint
Data = namedtuple("Data", "train eval model tokenizer head", defaults=("",))
State = namedtuple("State", "model optimizer")  # what a step works on


def learning_rate(config: Config, step: int, total: int) -> float:
    """Returns the rate at 0-based `step`: linear warm-up, then linearly to 0."""
    warmup = config.warmup * total
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    return config.lr * (total - step) / max(total - warmup, 1)


def validate(config: Config) -> Config:
    """Returns the config with the model's recipe where a field is None; refuses values outside their range."""
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
    if not config.lengths or list(config.lengths) != sorted(set(config.lengths)) or config.lengths[0] < 8:
        raise InputError(f"--lengths are {config.lengths}; they must rise and be at least 8")
    cli.need_data(config, "GLUE's folder or nyu-mll/glue")
    if not config.checkpoint and config.data != "synthetic":
        if not recipe.checkpoint:
            raise InputError(f"--checkpoint is missing: --model {config.model} needs one")
        config = replace(config, checkpoint=recipe.checkpoint)
    if config.labels:
        if not config.checkpoint or not config.pretrained:
            raise InputError(f"--labels is {config.labels}; it is for the head of a --checkpoint with its weights")
        if not glue.TASKS[config.task].labels:
            raise InputError(f"--labels is {config.labels}; {config.task} is a regression and has no classes")
        heads.given(config.labels, glue.TASKS[config.task].labels)
    return config


def open_data(config: Config) -> Data:
    """Opens the model and its tokenizer, and encodes the task's splits with it."""
    labels, splits = glue.TASKS[config.task].labels, ("train", *glue.TASKS[config.task].evaluation)
    texts = {split: glue.read(config.data, config.task, split, config.seed) for split in splits}
    if config.checkpoint:
        folder = files.local_folder(config.checkpoint)
        opened = encoder_files.open_checkpoint(folder, config.model, compiled=config.device == "xla")
        settings = opened.config
        tokenizer = opened.tokenizer
        source = opened.source if config.pretrained else None
    else:  # a trial
        words = [*texts["train"].first, *(texts["train"].second or [])]
        tokenizer = vocabulary.learn(words, encoders.record(config.model).tokenizer, SYNTHETIC_WORDS)
        settings = encoders.configuration(config.model, "tiny", tokenizer, config.lengths[-1])
        settings.initializer_range = SYNTHETIC_INIT
        source = None
    stated = heads.given(config.labels, labels) if config.labels else ()
    found = classification.classifier(settings, labels, source, stated)
    positions = architectures.positions(found.model)
    if config.lengths[-1] > positions:
        raise InputError(f"--lengths go up to {config.lengths[-1]}; the model has {positions} positions")
    if config.lr == 0 and found.head.untrained:
        raise InputError(found.head.untrained)
    sets = {split: glue.Encoded(text, tokenizer, config.lengths[-1]) for split, text in texts.items()}
    said = found.head.said
    if said.startswith(heads.NEW) and config.lr == 0:
        said += "; --lr 0 does not train it"
    return Data(sets.pop("train"), sets, found.model, tokenizer, said)


def batches(config: Config, examples: glue.Encoded, mesh: device.Mesh, train: bool) -> batching.Plan:
    """Returns which examples share a batch: in training any, padded to the shortest of --lengths that holds the longest
    of them; in evaluation those of like length. On plain PyTorch, whose shapes may vary, they are padded no further."""
    sizes = range(1, config.lengths[-1] + 1) if mesh.shapes_may_vary else config.lengths
    return batching.Shuffled(examples.lengths, config.batch_size, sizes, config.group_by_length or not train)


def collate(limits: architectures.Limits, batch: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Checks on the host what a batch indexes: on a device a wrong number would read another row of a table."""
    tensors = loading.as_tensors(batch)
    limits.check(tensors)
    return tensors


def build(config: Config, data: Data, mesh: device.Mesh) -> State:
    """Moves the model to the device and makes its optimizer, whose state exists from the start."""
    layers.use_forms(clamp_weights=not mesh.safe_forms)
    parts = math.lcm(8, mesh.num_devices) if mesh.kind.startswith("TPU") else 0  # 8: on 1 to 8 chips the same rows
    model = device.to_device(encoder_layers.fast_layers(data.model, parts), mesh, encoders.rules)
    groups = architectures.parameter_groups(model, config.weight_decay)
    betas = (0.9, encoders.record(config.model).fine_tuning.beta2)
    optimizer = torch.optim.AdamW(groups, config.lr, betas, ADAM_EPS, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    return State(model, optimizer)


def forward(state: State, batch: dict[str, Tensor], config: Config, mesh: device.Mesh) -> dict[str, Tensor]:
    """Returns sums over a batch with data/glue.py's entries, or over a part of one; padding does not count."""
    with mesh.autocast():
        logits = classification.logits(state.model, batch)
    losses = classification.losses(logits, batch["labels"])
    return {"loss": (losses * batch["mask"]).sum(), "examples": batch["mask"].sum()}


def train_step(state: State, batch: dict[str, Tensor], config: Config, mesh: device.Mesh) -> dict[str, Tensor]:
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


def eval_step(state: State, batch: dict[str, Tensor], config: Config, mesh: device.Mesh) -> Tensor:
    """Returns logits [B, labels], on every device and so on every host."""
    with torch.no_grad(), mesh.autocast():
        logits = classification.logits(state.model, batch)
    logits = logits.float()
    device.replicate(logits, mesh)
    return logits


def check_evaluation(data: Data, config: Config, mesh: device.Mesh) -> None:
    """Reads the first and the last examples of each split that is evaluated, and computes the metrics of its labels, as
    if all were predicted; raises InputError where an evaluation would."""
    checked = partial(collate, architectures.limits(data.model))
    for split, examples in data.eval.items():
        plan = batches(config, examples, mesh, train=False)
        loading.first_and_last(examples, plan, mesh, split=config.update_every, collate=checked)
        try:
            glue.score(config.task, examples.labels, examples.labels)
        except ValueError as error:
            raise InputError(f"the labels of {config.task}'s split {split} cannot be evaluated: {error}") from error


def evaluate(step, state: State, sets: dict[str, glue.Encoded], config: Config, mesh: device.Mesh) -> dict[str, float]:
    """Returns the task's metrics and the mean loss over each split; `step` is the compiled eval_step."""
    metrics, checked = {}, partial(collate, architectures.limits(state.model))
    state.model.eval()
    for split, examples in sets.items():
        plan = batches(config, examples, mesh, train=False)
        options = {"split": config.update_every, "workers": config.workers, "collate": checked}
        with loading.parallel_loader(examples, plan, mesh, train=False, **options) as loader:
            scores = {str(number): step(state, batch, config, mesh) for number, batch in enumerate(loader)}
        logits = torch.cat(list(checkpoint.to_host(scores).values()))
        order = np.concatenate([indices for indices, _ in plan.epoch(None)])
        logits, labels = logits[order >= 0], torch.from_numpy(examples.labels[order[order >= 0]])
        loss = (classification.losses(logits, labels).sum() / len(labels)).item()
        predictions = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)
        values = glue.score(config.task, predictions.numpy(), labels.numpy()) | {"loss": loss}
        prefix = "mismatched_" if split.endswith("mismatched") else ""
        metrics |= {prefix + name: value for name, value in values.items()}
    state.model.train()
    return metrics


def export(folder: str, state: State, data: Data, mesh: device.Mesh) -> None:
    """Writes what transformers' `pipeline("text-classification", model=folder)` loads."""
    weights = checkpoint.to_host(state.model.state_dict(), mesh.layers, mesh.main_process)
    if mesh.main_process:
        files.write_folder(folder, lambda local: encoder_files.save(local, state.model, weights, data.tokenizer))


def main(config: Config) -> dict[str, float]:
    """Fine-tunes, evaluates and exports; returns the final metrics, MNLI's second split's as mismatched_…."""
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
        raise InputError(f"the trial of --model xlnet is for one host, not {mesh.process_count}; give --checkpoint")
    data = open_data(config)
    plan = batches(config, data.train, mesh, train=True)
    per_epoch = loading.steps_per_epoch(data.train, plan, mesh, micro_batches=config.update_every)
    total = math.ceil(config.epochs * per_epoch)
    name = f"{config.model}-{config.task}{'-synthetic' if config.data == 'synthetic' else ''}"
    headline = f"{config.model} on {config.task}: {len(data.train):,} examples ({data.train.truncated:,} cut to "
    headline += f"{config.lengths[-1]} tokens) in batches of {config.batch_size} x {'|'.join(map(str, config.lengths))}"
    headline += f" with {plan.padding:.1%} padding, {total:,} steps ({config.epochs:g} epochs)"
    headline += splits.said(data.train, *data.eval.values())
    check_evaluation(data, config, mesh)
    run = Run(config, mesh, name=name, headline=headline, free=FREE, required=REQUIRED, total_steps=total)
    if run.finished:
        return run.print_summary()
    if data.head:
        run.message(data.head)

    state = build(config, data, mesh)
    start = run.resume(state.model, state.optimizer, examples=len(data.train), keep=config.keep)
    shapes = len(plan.shapes)
    train = accumulate.SeededStep(train_step, mesh, shapes)
    if config.update_every > 1:
        train = accumulate.AccumulatedStep(forward, update, state, ("loss",), mesh, per="examples", max_graphs=shapes)
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
        metrics = evaluation(start) if run.evaluation_due else {}  # its checkpoint is there, the run ended in it
        for step, batch in enumerate(loader, start + 1):
            lr = learning_rate(config, step - 1, total)
            device.set_lr(state.optimizer, lr)
            step_metrics = train(state, batch, config, mesh)
            if step == 1 or step % config.log_every == 0 or step == total:
                examples = step * len(data.train) // len(plan)
                run.log(step, examples=examples, input_wait=loader.input_wait(), lr=lr, **step_metrics)
            evaluates = step % (config.eval_every or len(plan)) == 0 or step == total
            due = config.save_every > 0 and step % config.save_every == 0
            run.checkpoint(step, due=due, evaluates=evaluates)
            if evaluates:
                metrics = evaluation(step)
        run.checkpoints.wait()
        if not metrics:  # killed after the last step, before the export
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
