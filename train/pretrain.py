"""Pretraining of BERT, RoBERTa, XLNet and DistilBERT on plain text, each by its own objective.

objectives  masked words for bert (with --next-sentence, --whole-words) and roberta; a permutation's last sixth for
            xlnet; a teacher's words for distilbert: models/objectives.py. fairseq-roberta: with fairseq's checkpoints
data        a folder that `make data DATASET=text DATA=…` makes from text
run         python -m train.pretrain tiny                              two minutes on two CPU cores, a small language
            python -m train.pretrain full --data /data/text            on a TPU VM
result      the published recipes: not run yet; tiny and small real text: README
"""

import math
import zlib
from collections import namedtuple
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

import torch
from timm.optim import Lamb
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, PreTrainedModel

from data import text
from data.pretraining import MaskedText, PermutedText
from errors import InputError
from models import encoders, objectives
from train.common import checkpoint, cli, device, files, loading
from train.common.run import Run

Recipe = namedtuple("Recipe", "batch_size steps lr warmup_steps weight_decay beta2 clip")  # clip: norm of all gradients
RECIPES = {
    # Devlin et al. 2019, A.2
    "bert": Recipe(256, 1_000_000, 1e-4, 10_000, 0.01, 0.999, 1.0),
    # Liu et al. 2019, table 9, base; its gradients are not clipped
    "roberta": Recipe(8192, 500_000, 6e-4, 24_000, 0.01, 0.98, math.inf),
    # Yang et al. 2019, table 7, of the large model
    "xlnet": Recipe(8192, 500_000, 4e-4, 40_000, 0.01, 0.999, 1.0),
    # Sanh et al. 2019, section 4: batches of up to 4,000; the rest from its distillation/train.py
    "distilbert": Recipe(4096, 100_000, 5e-4, 5_000, 0.0, 0.98, 5.0),
}
RECIPES["fairseq-roberta"] = RECIPES["roberta"]
ARCHITECTURE = {name: name.removeprefix("fairseq-") for name in RECIPES}


@dataclass(frozen=True)
class Config:
    model: Literal[tuple(RECIPES)] = "bert"  # architecture, and with it the objective
    size: Literal[tuple(encoders.SIZES)] = "base"  # of a new model
    data: str = ""  # folder that `make data DATASET=text` made, or "synthetic"
    checkpoint: str = ""  # hub id or folder of a model to go on from; "": a new one of --size
    teacher: str = ""  # hub id or folder of the BERT that a DistilBERT learns from
    predictions: int = 0  # places a row for predicted tokens; 0: 16 % of the row, XLNet 17 %
    whole_words: bool = False  # all pieces of a word are masked, or none
    next_sentence: bool = False  # bert: predicts as well whether one half of a row follows the other
    optimizer: Literal["adamw", "lamb"] = "adamw"  # lamb (You et al. 2020): for batches of many thousands
    batch_size: int | None = None  # rows an update, over all devices; None: the recipe's, as for the next three
    steps: int | None = None  # updates
    lr: float | None = None  # peak learning rate; it falls linearly to 0
    warmup_steps: int | None = None  # updates in which it rises
    update_every: int = 1  # parts that a batch comes in, where it does not fit into memory; each counts the same
    precision: Literal["bfloat16", "float32"] = "bfloat16"  # of forward and backward pass; parameters are float32
    seed: int = 0  # of new weights, the order of the data, masks and dropout
    workers: int = 1  # processes a host that make batches; -1: one a core, 0: none
    log_every: int = 100  # updates between lines of metrics
    eval_every: int = 5000  # updates between evaluations and checkpoints
    keep: int = 2  # checkpoints that stay
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run


# You et al. 2020, table 4: batches of 32k
LAMB = Config(optimizer="lamb", batch_size=32_768, steps=15_625, lr=5e-3, warmup_steps=3_125, update_every=8)
TINY = Config(
    size="tiny",
    data="synthetic",
    batch_size=32,
    steps=500,
    lr=3e-3,
    warmup_steps=50,
    precision="float32",
    workers=0,
    log_every=25,
    eval_every=250,
)

# What a run may change when it is resumed: none of these touches a number.
FREE = ("workers", "log_every", "strict")
ADAM_EPS = 1e-6  # of all four papers
SYNTHETIC_LENGTH, SYNTHETIC_INIT = 32, 0.05  # of a trial: tokens of a row, and the spread of new weights


def learning_rate(config: Config, step: int) -> float:
    """Of update 0, 1, …: linear warm-up, then linearly to 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    return config.lr * (config.steps - step) / max(config.steps - config.warmup_steps, 1)


def completed(config: Config) -> Config:
    """With the model's recipe where a field is None. Refuses values outside their range."""
    for name in ("batch_size", "steps", "lr", "warmup_steps"):
        if getattr(config, name) is None:
            config = replace(config, **{name: getattr(RECIPES[config.model], name)})
    at_least = {1: "batch_size steps update_every log_every eval_every keep", -1: "workers"}
    at_least[0] = "predictions lr warmup_steps seed"
    for low, fields in at_least.items():
        for field in fields.split():
            if not getattr(config, field) >= low:
                raise InputError(f"--{field.replace('_', '-')} is {getattr(config, field)}; it must be at least {low}")
    if config.batch_size % config.update_every:
        raise InputError(f"--batch-size {config.batch_size} does not divide by --update-every {config.update_every}")
    if not config.data:
        raise InputError("--data is missing: give a folder that `make data` made; `--data synthetic` is a trial")
    if config.model == "distilbert" and not (config.teacher or config.data == "synthetic"):
        raise InputError("--teacher is missing: give a folder or hub id, such as google-bert/bert-base-uncased")
    if config.next_sentence and config.model != "bert":
        raise InputError(f"--next-sentence is an objective of bert, not of {config.model}")
    return config


def open_data(config: Config):
    """(training rows, validation rows) with their masks, see data/pretraining.py."""
    if config.data == "synthetic":
        options = SYNTHETIC_LENGTH, config.next_sentence, config.seed
        splits = [text.SyntheticText(split, ARCHITECTURE[config.model], *options) for split in ("train", "valid")]
    else:
        splits = [text.open_text(config.data, split) for split in ("train", "valid")]
        kind, wanted = splits[0].kind, ARCHITECTURE[config.model]
        if kind != wanted and {kind, wanted} != {"bert", "distilbert"}:
            raise InputError(f"{config.data} was prepared with --kind {kind}; --model {config.model} needs {wanted}")
    share = 17 if config.model == "xlnet" else 16
    predictions = config.predictions or -(-splits[0].length * share // 100)
    if config.model == "xlnet":
        return [PermutedText(split, predictions) for split in splits]
    return [MaskedText(split, predictions, config.whole_words, config.next_sentence) for split in splits]


def open_model(config: Config, rows: text.Text) -> PreTrainedModel:
    """The model on the host: of --checkpoint, or new."""
    auto_class = AutoModelForPreTraining if config.next_sentence or config.model == "xlnet" else AutoModelForMaskedLM
    if config.checkpoint:
        folder = files.local_folder(config.checkpoint)
        settings, weights, tokenizer = encoders.open_checkpoint(folder, config.model)
        encoders.same_vocabulary(config.checkpoint, tokenizer, rows.tokenizer, config.data)
        model = encoders.load(auto_class, settings, weights, folder)
    else:
        settings = encoders.configuration(ARCHITECTURE[config.model], config.size, rows.tokenizer, rows.length)
        if config.data == "synthetic":
            settings.initializer_range = SYNTHETIC_INIT
        model = auto_class.from_config(settings, dtype=torch.float32)
    if rows.length > encoders.positions(settings):
        raise InputError(f"rows have {rows.length} tokens; the model has {encoders.positions(settings)} positions")
    return model


def build(config: Config, model: PreTrainedModel, mesh: device.Mesh) -> torch.optim.Optimizer:
    """Moves the model to the device; its optimizer, with the state in being."""
    device.to_device(encoders.fast_layers(model), mesh)
    recipe = RECIPES[config.model]
    groups = encoders.parameter_groups(model, recipe.weight_decay)
    options = {"lr": config.lr, "betas": (0.9, recipe.beta2), "eps": ADAM_EPS, "foreach": False}
    if config.optimizer == "lamb":
        # Without bias correction, as in the authors' code: the warm-up does its work.
        optimizer = Lamb(groups, **options, bias_correction=False, max_grad_norm=None)
    else:
        optimizer = torch.optim.AdamW(groups, **options)
    device.init_optimizer_state(optimizer, mesh)
    return optimizer


def train_step(model, teacher, optimizer, batch: dict[str, Tensor], clip: float, mesh) -> dict[str, Tensor]:
    """One update from one batch; returns the losses."""
    with mesh.autocast():
        parts = objectives.losses(model, teacher, batch)
    parts["loss"].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {name: part.detach() for name, part in parts.items()}


def gradient_step(model, teacher, batch: dict[str, Tensor], totals: dict[str, Tensor], every: int, mesh) -> None:
    """Adds the gradients of a part of a batch to the parameters' `grad`, and its losses to `totals`."""
    with mesh.autocast():
        parts = objectives.losses(model, teacher, batch)
    (parts["loss"] / every).backward()
    for name, total in totals.items():
        total.add_(parts[name].detach() / every)


def update_step(model, optimizer, totals: dict[str, Tensor], clip: float) -> dict[str, Tensor]:
    """One update from the gradients of all parts; returns the losses."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False)
    optimizer.step()
    parts = {name: total.clone() for name, total in totals.items()}
    for tensor in [*totals.values(), *(parameter.grad for parameter in model.parameters())]:
        tensor.zero_()
    return parts


def eval_step(model, batch: dict[str, Tensor], mesh) -> dict[str, Tensor]:
    """Sums over a batch, see models/objectives.py."""
    with torch.no_grad(), mesh.autocast():
        return objectives.scores(model, batch)


def evaluate(step, model, dataset, config: Config, mesh) -> dict[str, float]:
    """Mean loss (nats) and accuracy of the predicted tokens, and of the next sentence; `step` is the compiled
    eval_step. The masks are the same each time."""
    model.eval()
    rows = config.batch_size // config.update_every
    with loading.parallel_loader(dataset, rows, mesh, train=False, seed=config.seed, workers=config.workers) as loader:
        sums = [step(model, batch, mesh) for batch in loader]
    model.train()
    values = device.fetch([batch[name] for batch in sums for name in sums[0]])
    totals = {name: math.fsum(values[i :: len(sums[0])]) for i, name in enumerate(sums[0])}
    counts = {"loss": "predicted", "accuracy": "predicted", "next_sentence_accuracy": "rows"}
    return {name: totals[name] / totals[count] for name, count in counts.items() if name in totals}


def export(folder: str, model: PreTrainedModel, tokenizer, config: Config) -> None:
    """Writes what transformers and `train.glue --checkpoint` load; of fairseq-roberta also what fairseq loads."""
    weights = checkpoint.to_host({name: value.detach() for name, value in model.state_dict().items()})

    def write(local: str) -> None:
        encoders.save(local, model, weights, tokenizer)
        if config.model == "fairseq-roberta":
            encoders.own_module(config.model).write_folder(f"{local}/fairseq", model.config, weights, tokenizer)

    files.write_folder(folder, write)


def main(config: Config) -> dict[str, float]:
    """Pretrains and exports; returns the final metrics of the validation rows."""
    config = completed(config)
    mesh = device.setup(config.seed, config.precision, config.strict)
    train_set, valid_set = open_data(config)
    rows, trial = train_set.text, config.data == "synthetic"
    if config.model == "distilbert" and not config.teacher:  # a trial, which makes its teacher
        name = f"teacher-{zlib.crc32(repr(config).encode()):08x}"  # one for each set of flags
        main(replace(config, model="bert", name=name))
        device.over_hosts(mesh, 0)  # the main process has written it when all are here
        config = replace(config, teacher=f"{config.runs}/{name}/export")
        device.reset_graph_report()
    model, teacher = open_model(config, rows), None
    if config.model == "distilbert":
        folder = files.local_folder(config.teacher)
        distilbert = encoders.own_module(config.model, objectives.MODULES)
        teacher = distilbert.open_teacher(folder, model, rows.tokenizer, config.data, not config.checkpoint)
    total, every = config.steps, config.update_every
    epochs = total * every / loading.steps_per_epoch(train_set, config.batch_size // every, mesh)
    headline = f"{config.model} on {config.data}: {len(rows):,} rows of {rows.length} tokens, {train_set.predictions} "
    headline += f"predicted, {model.num_parameters():,} parameters, {total:,} updates of {config.batch_size} rows "
    headline += f"({epochs:.1f} epochs) on {mesh.num_devices} {mesh.kind} device(s)"
    run = Run(
        config,
        default_name=f"{config.model}-{'synthetic' if trial else 'pretraining'}",
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

    optimizer, clip = build(config, model, mesh), RECIPES[config.model].clip
    if teacher is not None:
        device.to_device(encoders.fast_layers(teacher), mesh)
    checkpoints = checkpoint.Checkpointer(f"{run.path}/checkpoints", config.keep, mesh.main_process)
    start = checkpoints.restore(model, optimizer, mesh)
    device.same_on_all_hosts(mesh, "the update to resume from", start)
    device.same_on_all_hosts(mesh, "the number of training rows", len(rows))
    if run.resumed:
        run.resume_at(start)
    step_fn, eval_fn = device.compiled(train_step, mesh), device.compiled(eval_step, mesh)
    gradient_fn, update_fn = device.compiled(gradient_step, mesh), device.compiled(update_step, mesh)
    totals = device.gradient_buffers(model, ("loss", "words"), mesh) if every > 1 else {}
    model.train()
    metrics: dict[str, float] = {}
    span = {"seed": config.seed, "start": start * every, "stop": total * every, "workers": config.workers}
    loader = loading.parallel_loader(train_set, config.batch_size // every, mesh, train=True, **span)
    with device.stop_requested(mesh, every=max(10 // every, 1)) as stopped, closing(run), checkpoints, loader:
        for number, batch in enumerate(loader, start * every + 1):
            device.seed_step(config.seed, number)
            step = -(-number // every)
            lr = learning_rate(config, step - 1)
            device.set_lr(optimizer, lr)
            if every == 1:
                step_metrics = step_fn(model, teacher, optimizer, batch, clip, mesh)
            else:
                gradient_fn(model, teacher, batch, totals, every, mesh)
                if number % every:
                    continue
                step_metrics = update_fn(model, optimizer, totals, clip)
            if step == 1 or step % config.log_every == 0 or step == total:
                run.log(step, examples=step * config.batch_size, input_wait=loader.input_wait(), lr=lr, **step_metrics)
            stop = stopped() and step < total
            evaluates = step % config.eval_every == 0 or step == total
            if evaluates:
                with run.pause():
                    metrics = evaluate(eval_fn, model, valid_set, config, mesh)
                run.evaluation(step, **metrics)
            # After the evaluation, so that a run resumed from this checkpoint has its figures.
            if evaluates or stop:
                with run.pause():
                    run.upload()  # so that what a resumed run keeps is there before its checkpoint is
                    checkpoints.save(step, model, optimizer)
            checkpoints.raise_failure()
            if stop:
                checkpoints.wait()
                run.message(f"stopped by a signal at update {step}: saved; the same command goes on from here")
                raise SystemExit(143)
        checkpoints.wait()
        if not metrics:  # killed after the last update, before the export
            metrics = evaluate(eval_fn, model, valid_set, config, mesh)
        if mesh.main_process:
            export(f"{run.path}/export", model, rows.tokenizer, config)
        run.finish(metrics, device.graph_report())
    return metrics


PRESETS = {
    "full": ("the model's published recipe; needs --data and accelerators", Config()),
    "lamb": ("BERT with batches of 32k and LAMB", LAMB),
    "tiny": ("a small network and a small language: two minutes on a CPU", TINY),
}

if __name__ == "__main__":
    cli.run(main, PRESETS)
