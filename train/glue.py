"""GLUE: fine-tuning BERT, DistilBERT, RoBERTa, XLNet, or any encoder of transformers, on any of the nine tasks.

paper     Wang et al. 2019, GLUE (arXiv:1804.07461); recipes: RECIPES, with their sources
data      a folder of GLUE's own TSV files, the hub id nyu-mll/glue, or a folder of `datasets`
run       python -m train.glue tiny                                          a minute on two CPU cores, synthetic task
          python -m train.glue full --data nyu-mll/glue --task mrpc          on a TPU VM
result    of published checkpoints: not run yet (they cannot be had here); small real data: README
"""

import math
from collections import namedtuple
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from data import batching, glue, vocabulary
from errors import InputError
from models import encoders
from train.common import checkpoint, cli, device, files, loading
from train.common.run import Run

# Of `checkpoint`, a hub id; warmup: the share of the steps in which the learning rate rises.
Recipe = namedtuple("Recipe", "checkpoint lr warmup weight_decay epochs beta2", defaults=(0.999,))
# One of the values that the papers searched for each task; --lr, --batch-size and --epochs give others.
RECIPES = {
    # Devlin et al. 2019, A.3: 5e-5, 3e-5 or 2e-5; the rest from google-research/bert, run_classifier.py
    "bert": Recipe("google-bert/bert-base-uncased", lr=2e-5, warmup=0.1, weight_decay=0.01, epochs=3),
    # Sanh et al. 2019 fine-tune as BERT
    "distilbert": Recipe("distilbert/distilbert-base-uncased", lr=5e-5, warmup=0.1, weight_decay=0.01, epochs=3),
    # Liu et al. 2019, table 10: 1e-5, 2e-5 or 3e-5
    "roberta": Recipe("FacebookAI/roberta-base", lr=2e-5, warmup=0.06, weight_decay=0.1, epochs=10, beta2=0.98),
    # Yang et al. 2019, table 8: 2e-5 to 5e-5, no weight decay; there in steps: 800 (MRPC) to 12,000 (MNLI)
    "xlnet": Recipe("xlnet/xlnet-base-cased", lr=3e-5, warmup=0.1, weight_decay=0.0, epochs=3),
}
# fairseq's examples/roberta; --checkpoint is a folder of fairseq's release, with model.pt
RECIPES["fairseq-roberta"] = RECIPES["roberta"]._replace(checkpoint="")
RECIPES["auto"] = RECIPES["bert"]._replace(checkpoint="")  # any architecture, by --checkpoint


@dataclass(frozen=True)
class Config:
    model: Literal[tuple(RECIPES)] = "bert"  # architecture; auto: the one of --checkpoint
    task: Literal[tuple(glue.TASKS)] = "mrpc"  # of GLUE
    data: str = ""  # folder of TSV files, hub id or folder of `datasets`, or "synthetic"
    checkpoint: str = ""  # hub id, or folder with configuration, weights and tokenizer; "": the model's usual one
    pretrained: bool = True  # False: of --checkpoint only configuration and tokenizer, with new weights
    lengths: tuple[int, ...] = (32, 64, 128)  # tokens of a sequence: a compiled shape each; longer ones are cut
    batch_size: int = 32  # sequences a step, over all devices
    epochs: float | None = None  # passes over the data; None: the model's recipe, as for the next three
    lr: float | None = None  # peak learning rate
    warmup: float | None = None  # share of the steps in which the learning rate rises; then it falls linearly to 0
    weight_decay: float | None = None  # of AdamW; not of biases and norms
    clip: float = 1.0  # largest norm of all gradients
    precision: Literal["bfloat16", "float32"] = "bfloat16"  # of forward and backward pass; parameters are float32
    seed: int = 0  # of new weights, the order of the data and dropout
    workers: int = 1  # processes a host that make batches; -1: one a core, 0: none
    log_every: int = 50  # steps between lines of metrics
    eval_every: int = 0  # steps between evaluations and checkpoints; 0: an epoch
    keep: int = 1  # checkpoints that stay
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run


TINY = Config(
    data="synthetic",
    task="sst2",
    lengths=(16, 32),
    epochs=6,
    lr=2e-3,
    weight_decay=0.01,
    precision="float32",
    workers=0,
)

# What a run may change when it is resumed: none of these touches a number.
FREE = ("workers", "log_every", "strict")
ADAM_EPS = 1e-6  # of all four papers
SYNTHETIC_WORDS, SYNTHETIC_INIT = 400, 0.05  # of a trial: most tokens, and the spread of new weights


def learning_rate(config: Config, step: int, total: int) -> float:
    """Of step 0, 1, …: linear warm-up, then linearly to 0."""
    warmup = config.warmup * total
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    return config.lr * (total - step) / max(total - warmup, 1)


def completed(config: Config) -> Config:
    """With the model's recipe where a field is None. Refuses values outside their range."""
    recipe = RECIPES[config.model]
    values = {name: getattr(recipe, name) for name in ("epochs", "lr", "warmup", "weight_decay")}
    config = replace(config, **{name: value for name, value in values.items() if getattr(config, name) is None})
    at_least = {1: "batch_size log_every keep", 0: "lr warmup weight_decay eval_every seed", -1: "workers"}
    for low, fields in at_least.items():
        for field in fields.split():
            if not getattr(config, field) >= low:
                raise InputError(f"--{field.replace('_', '-')} is {getattr(config, field)}; it must be at least {low}")
    for field in ("epochs", "clip"):
        if not getattr(config, field) > 0:
            raise InputError(f"--{field} is {getattr(config, field)}; it must be above 0")
    if config.warmup >= 1:
        raise InputError(f"--warmup is {config.warmup}; it must be a share of the steps, below 1")
    if not config.lengths or list(config.lengths) != sorted(set(config.lengths)) or config.lengths[0] < 8:
        raise InputError(f"--lengths are {config.lengths}; they must rise and be at least 8")
    if not config.data:
        raise InputError("--data is missing: give GLUE's folder or nyu-mll/glue; `--data synthetic` is a trial")
    if not config.checkpoint and config.data != "synthetic":
        if not recipe.checkpoint:
            raise InputError(f"--checkpoint is missing: --model {config.model} needs one")
        config = replace(config, checkpoint=recipe.checkpoint)
    return config


def open_model(config: Config) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """(classifier on the host, tokenizer); the classifier's head is new."""
    weights = None
    if config.checkpoint:
        folder = files.local_folder(config.checkpoint)
        settings, weights, tokenizer = encoders.open_checkpoint(folder, config.model)
    else:  # a trial
        examples = glue.read(config.data, config.task, "train", config.seed)
        kind = {"fairseq-roberta": "roberta", "auto": "bert"}.get(config.model, config.model)
        tokenizer = vocabulary.learn([*examples.first, *(examples.second or [])], kind, SYNTHETIC_WORDS)
        settings = encoders.configuration(kind, "tiny", tokenizer, config.lengths[-1])
        settings.initializer_range = SYNTHETIC_INIT
    if config.lengths[-1] > encoders.positions(settings):
        raise InputError(
            f"--lengths go up to {config.lengths[-1]}; the model has {encoders.positions(settings)} positions"
        )
    labels = glue.TASKS[config.task].labels
    settings.num_labels = max(len(labels), 1)
    settings.problem_type = "single_label_classification" if labels else "regression"
    if labels:
        settings.id2label, settings.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
    if config.checkpoint and config.pretrained:
        return encoders.load(AutoModelForSequenceClassification, settings, weights, folder), tokenizer
    return AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32), tokenizer


def build(config: Config, model: PreTrainedModel, mesh: device.Mesh) -> torch.optim.Optimizer:
    """Moves the model to the device; its optimizer, with the state in being."""
    device.to_device(encoders.fast_layers(model), mesh)
    groups = encoders.parameter_groups(model, config.weight_decay)
    betas = (0.9, RECIPES[config.model].beta2)
    optimizer = torch.optim.AdamW(groups, config.lr, betas, ADAM_EPS, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    return optimizer


def forward(model, batch: dict[str, Tensor], mesh) -> Tensor:
    """Logits [B, labels], float32, of batch["input_ids"], "attention_mask" and "token_type_ids" [B, T]."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if model.config.model_type == "xlnet" or getattr(model.config, "type_vocab_size", 0) > 1:  # not RoBERTa's
        inputs["token_type_ids"] = batch["token_type_ids"]
    if model.config.model_type == "xlnet":
        inputs["use_mems"] = False
    with mesh.autocast():
        return model(**inputs).logits.float()


def mean_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy, or the squared error where there is one output; rows without an example do not count."""
    if logits.shape[1] == 1:
        losses = (logits[:, 0] - batch["labels"]).square()
    else:
        losses = F.cross_entropy(logits, batch["labels"].long(), reduction="none")
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def train_step(model, optimizer, batch: dict[str, Tensor], clip: float, mesh) -> dict[str, Tensor]:
    """One update on a batch of loading's, with data/glue.py's entries; returns the mean loss."""
    loss = mean_loss(forward(model, batch, mesh), batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), "gradient_norm": norm.detach()}


def eval_step(model, batch: dict[str, Tensor], mesh) -> Tensor:
    """Logits [B, labels], on every device."""
    with torch.no_grad():
        logits = forward(model, batch, mesh)
    device.replicate(logits, mesh)
    return logits


def evaluate(step, model, sets: dict[str, glue.Encoded], config: Config, mesh) -> dict[str, float]:
    """The task's metrics on all examples of each split, and the mean loss; `step` is the compiled eval_step."""
    metrics = {}
    for split, dataset in sets.items():
        prefix = "mismatched_" if split.endswith("mismatched") else ""
        values = evaluate_split(step, model, dataset, config, mesh)
        metrics |= {prefix + name: value for name, value in values.items()}
    return metrics


def evaluate_split(step, model, dataset: glue.Encoded, config: Config, mesh) -> dict[str, float]:
    """The same for one split."""
    model.eval()
    plan = batching.Buckets(dataset.lengths, [(config.batch_size, length) for length in config.lengths])
    with loading.parallel_loader(dataset, plan, mesh, train=False, workers=config.workers) as loader:
        batches = {str(number): step(model, batch, mesh) for number, batch in enumerate(loader)}
    model.train()
    logits = torch.cat(list(checkpoint.to_host(batches).values()))
    order = np.concatenate([indices for indices, _ in plan.epoch(None)])
    logits, labels = logits[order >= 0], torch.from_numpy(dataset.labels[order[order >= 0]])
    loss = mean_loss(logits, {"labels": labels, "mask": torch.ones(len(labels))}).item()
    predictions = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)
    return glue.score(config.task, predictions.numpy(), labels.numpy()) | {"loss": loss}


def export(folder: str, model: PreTrainedModel, tokenizer) -> None:
    """Writes what transformers' `pipeline("text-classification", model=folder)` loads."""
    weights = checkpoint.to_host({name: value.detach() for name, value in model.state_dict().items()})
    files.write_folder(folder, lambda local: encoders.save(local, model, weights, tokenizer))


def main(config: Config) -> dict[str, float]:
    """Fine-tunes, evaluates and exports; returns the final metrics of the validation split: the task's and loss, those
    of MNLI's second split with the prefix mismatched_."""
    config = completed(config)
    mesh = device.setup(config.seed, config.precision, config.strict)
    if mesh.process_count > 1 and config.model == "xlnet" and not config.checkpoint:  # see vocabulary.learn
        raise InputError(
            f"the trial of --model xlnet is for one host, not {mesh.process_count}: each would learn another "
            "vocabulary; give --checkpoint, or try another --model"
        )
    model, tokenizer = open_model(config)
    sets = {}
    for split in ("train", *glue.TASKS[config.task].evaluation):
        examples = glue.read(config.data, config.task, split, config.seed)
        sets[split] = glue.Encoded(examples, tokenizer, config.lengths[-1])
    train_set = sets.pop("train")
    plan = batching.Buckets(train_set.lengths, [(config.batch_size, length) for length in config.lengths])
    total = math.ceil(config.epochs * loading.steps_per_epoch(train_set, plan, mesh))
    trial = config.data == "synthetic"
    headline = f"{config.model} on {config.task}: {len(train_set):,} examples ({train_set.truncated:,} cut to "
    headline += (
        f"{config.lengths[-1]} tokens) in batches of {config.batch_size} x {'|'.join(map(str, config.lengths))} "
    )
    headline += f"with {plan.padding:.1%} padding, {total:,} steps ({config.epochs:g} epochs) on {mesh.num_devices} "
    headline += f"{mesh.kind} device(s)"
    run = Run(
        config,
        default_name=f"{config.model}-{config.task}{'-synthetic' if trial else ''}",
        headline=headline + ("; this is a trial, for real training see --help" if trial else ""),
        devices={"kind": mesh.kind, "devices": mesh.num_devices, "hosts": mesh.process_count},
        main_process=mesh.main_process,
        free=FREE,
        total_steps=total,
    )
    run.check_hosts(mesh)
    if run.finished:
        run.print_summary()
        return run.summary["metrics"]

    optimizer = build(config, model, mesh)
    checkpoints = checkpoint.Checkpointer(f"{run.path}/checkpoints", config.keep, mesh.main_process)
    start = checkpoints.restore(model, optimizer, mesh)
    device.same_on_all_hosts(mesh, "the step to resume from", start)
    device.same_on_all_hosts(mesh, "the number of training examples", len(train_set))
    if run.resumed:
        run.resume_at(start)
    step_fn = device.compiled(train_step, mesh, len(plan.shapes))
    eval_fn = device.compiled(eval_step, mesh, len(plan.shapes))
    model.train()
    metrics: dict[str, float] = {}
    span = {"seed": config.seed, "start": start, "stop": total}
    loader = loading.parallel_loader(train_set, plan, mesh, train=True, workers=config.workers, **span)
    with device.stop_requested(mesh) as stopped, closing(run), checkpoints, loader:
        for step, batch in enumerate(loader, start + 1):
            device.seed_step(config.seed, step)
            lr = learning_rate(config, step - 1, total)
            device.set_lr(optimizer, lr)
            step_metrics = step_fn(model, optimizer, batch, config.clip, mesh)
            if step == 1 or step % config.log_every == 0 or step == total:
                examples = step * len(train_set) // len(plan)
                run.log(step, examples=examples, input_wait=loader.input_wait(), lr=lr, **step_metrics)
            stop = stopped() and step < total
            evaluates = step % (config.eval_every or len(plan)) == 0 or step == total
            if evaluates:
                with run.pause():
                    metrics = evaluate(eval_fn, model, sets, config, mesh)
                run.evaluation(step, **metrics)
            # After the evaluation, so that a run resumed from this checkpoint has its figures.
            if evaluates or stop:
                with run.pause():
                    run.upload()  # so that what a resumed run keeps is there before its checkpoint is
                    checkpoints.save(step, model, optimizer)
            checkpoints.raise_failure()
            if stop:
                checkpoints.wait()
                run.message(f"stopped by a signal at step {step}: saved; the same command goes on from here")
                raise SystemExit(143)
        checkpoints.wait()
        if not metrics:  # killed after the last step, before the export
            metrics = evaluate(eval_fn, model, sets, config, mesh)
        if mesh.main_process:
            export(f"{run.path}/export", model, tokenizer)
        run.finish(metrics, device.graph_report())
    return metrics


PRESETS = {
    "full": ("fine-tuning by the model's recipe; needs --data", Config()),
    "tiny": ("a small network and a synthetic task: a minute on a CPU", TINY),
}

if __name__ == "__main__":
    cli.run(main, PRESETS)
