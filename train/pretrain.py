"""Pretraining of BERT, RoBERTa, XLNet and DistilBERT on plain text, each by its own objective.

objectives  models/objectives.py
            bert        masked words, with --whole-words all pieces of a word or none;
                        with --next-sentence also whether a row's second half follows its first
            roberta     masked words; fairseq-roberta: with fairseq's checkpoints
            xlnet       the last sixth of a random order of the tokens
            distilbert  masked words, and its teacher's predictions of them
data        a folder that `make data DATASET=text DATA=…` makes from text
run         python -m train.pretrain tiny                      a small language: two minutes on two
                                                               CPU cores
            python -m train.pretrain full --data /data/text    on a TPU VM
result      the published recipes: not run yet; tiny and small real text: docs/results.md
"""

if __name__ == "__main__" and not __package__:  # by its path: the imports below are not found
    raise SystemExit(
        "error: in the project's folder run it as a module: python -m train.pretrain tiny"
    )

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from timm.optim import Lamb
from torch import Tensor, nn

from data import pretraining, splits
from errors import InputError
from models import architectures, encoder_files, encoder_layers, encoders, layers, objectives
from models.encoders.record import Pretraining
from train.common import accumulate, checkpoint, cli, device, files, loading, moments
from train.common.batches import Examples
from train.common.benchmark import Benchmark
from train.common.evaluation import FIELDS, FinishedRun, resolve_config
from train.common.mesh import WHOLE, Layout, Mesh
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    model: Literal[encoders.PRETRAINED] = "bert"  # architecture, and with it the objective
    size: Literal[tuple(encoders.SIZES)] = "base"  # of a new model
    data: str = ""  # folder or URL that `make data DATASET=text` made, or "synthetic"
    evaluate: str = ""  # a finished run's folder: nothing is trained, its export is evaluated
    split: str = ""  # of --data, with --evaluate: train or valid; "": as in training
    checkpoint: str = ""  # HF hub id or folder of a model to start from; "": a new one of --size
    teacher: str = ""  # HF hub id or folder of the BERT that a DistilBERT learns from
    predictions: int = 0  # predicted tokens per row, at most; 0: 16 % of the row, XLNet 17 %
    whole_words: bool = False  # all pieces of a word are masked, or none
    next_sentence: bool = False  # bert: also predicts whether a row's 2nd half follows its 1st
    optimizer: Literal["adamw", "lamb"] = "adamw"  # lamb (You et al. 2020): for very large batches
    moments: Literal["float32", "bfloat16"] = "float32"  # of the optimizer: docs/large_models.md
    batch_size: int | None = None  # rows per update, over all devices; None: the model's recipe
    steps: int | None = None  # updates; None: the recipe
    lr: float | None = None  # peak learning rate; it falls linearly to 0; None: the recipe
    warmup_steps: int | None = None  # updates in which it rises; None: the recipe
    update_every: int = 1  # gradient-accumulation steps: micro-batches that a batch is cut into
    precision: Literal["bfloat16", "float32", "fast_float32"] = "bfloat16"  # train/common/device.py
    device: Literal["xla", "cpu", "cuda", "tpu"] = "xla"  # xla: TPU, CPU; tpu: TorchTPU, never run
    layout: Layout = WHOLE  # --mesh, --shard-state, --remat: docs/large_models.md
    seed: int = 0  # of new weights, the order of the data, masks and dropout
    workers: int = 1  # processes per host that make batches; -1: one per core, 0: none
    log_every: int = 100  # updates between lines of metrics
    eval_every: int = 5000  # updates between evaluations
    save_every: int = 0  # updates between checkpoints besides those at evaluations; 0: none
    keep: int = 2  # checkpoints that stay
    best: str = ""  # exports the best checkpoint by accuracy, -loss, …; "": the last
    patience: int = 0  # evaluations without a better --best that end the training; 0: none do
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes: docs/tpu.md


# You et al. 2020, table 4: batches of 32k
LAMB = Config(
    optimizer="lamb",
    batch_size=32_768,
    steps=15_625,
    lr=5e-3,
    warmup_steps=3_125,
    update_every=8,
)
TINY = Config(
    **cli.TRIAL,
    size="tiny",
    batch_size=32,
    steps=500,
    lr=3e-3,
    warmup_steps=50,
    log_every=25,
    eval_every=250,
)

# Fields that a resumed run may change: these do not change the trained weights. keep does not
# either, but has never been among them: a run with another --keep is another run.
MAY_CHANGE = ("workers", "log_every", "save_every", "strict", "layout", "safe_forms")
# Flags that may be given with --evaluate; all others are the run's. They change no number beyond
# rounding.
EVALUATE_FLAGS = ("batch_size", "update_every")
# Fields that a trial's teacher does not have. They do not count for its name: older versions had
# none of them, and find their teachers again.
OF_STUDENT = ("best", "patience")
# Fields that older versions did not have. They count for that name where they are not the default.
NEWER = ("moments",)
# The vector memory of a TPU core that one fusion may use: v6e's default, set on other TPUs, too,
# whose default is less (docs/tpu/findings.md).
VMEM_KIB = 32_768
BETA1 = 0.9  # of AdamW and LAMB
ADAM_EPS = 1e-6  # of BERT's and DistilBERT's code, and in RoBERTa's and XLNet's papers
SYNTHETIC_LENGTH = 32  # a trial's tokens per row
SYNTHETIC_INIT = 0.05  # the spread of a trial's new weights

Rows = pretraining.MaskedText | pretraining.PermutedText  # of text, with tokens to predict


class Data(NamedTuple):
    """What a run reads."""

    train: Rows
    eval: Rows
    model: nn.Module  # on the host
    teacher: nn.Module | None  # of DistilBERT, on the host


class State(NamedTuple):
    """What a step works on."""

    model: nn.Module
    teacher: nn.Module | None
    optimizer: torch.optim.Optimizer | None  # None: nothing is trained


def learning_rate(config: Config, step: int) -> float:
    """Returns the rate at 0-based update `step`: linear warm-up, then linearly to 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    # Where the warm-up takes all steps, only a step after the last comes here.
    steps_to_fall = max(config.steps - config.warmup_steps, 1)
    return config.lr * (config.steps - step) / steps_to_fall


def recipe_of(config: Config) -> Pretraining:
    """Returns the published numbers for a model of this size."""
    encoder = encoders.by_name(config.model)
    return encoder.pretraining_of_size.get(config.size, encoder.pretraining)


def with_recipe(config: Config) -> Config:
    """Returns the config with the recipe's numbers where a field is None."""
    recipe = recipe_of(config)
    for name in ("batch_size", "steps", "lr", "warmup_steps"):
        if getattr(config, name) is None:
            config = replace(config, **{name: getattr(recipe, name)})
    return config


def validate(config: Config) -> Config:
    """Returns the config with the model's recipe where a field is None; raises InputError where a
    value is outside its range."""
    config = with_recipe(config)
    cli.at_least(config, 1, "batch_size", "steps", "update_every")
    cli.at_least(config, 1, "log_every", "eval_every", "keep")
    cli.at_least(config, 0, "predictions", "lr", "warmup_steps", "save_every", "seed", "patience")
    cli.at_least(config, -1, "workers")
    cli.need_data(config, "a folder that `make data` made")
    encoder = encoders.by_name(config.model)
    if encoder.teacher and not config.teacher and config.data != "synthetic":
        such_as = encoders.by_name(encoder.teacher).fine_tuning.checkpoint
        raise InputError(f"--teacher is missing: give a folder or hub id, such as {such_as}")
    can_predict_next_sentence = encoder.language_head.next_sentence_logits is not None
    if config.next_sentence and not can_predict_next_sentence:
        raise InputError(f"--next-sentence is an objective of bert, not of {config.model}")
    return config


def open_data(config: Config) -> Data:
    """Opens the rows, the model and, for a DistilBERT, its teacher."""
    train = _open_rows(config, "train")
    valid = _open_rows(config, "valid")
    model = _open_model(config, train)

    teacher = None
    if encoders.by_name(config.model).teacher:
        folder = files.local_folder(config.teacher)
        open_teacher = objectives.of_encoder(config.model).open_teacher
        tokenizer = train.text.tokenizer
        # It also copies layers of the teacher into a new student, `model`.
        is_new = not config.checkpoint
        teacher = open_teacher(folder, model, tokenizer, config.data, init_student=is_new)
    return Data(train, valid, model, teacher)


def _open_rows(config: Config, split: str) -> Rows:
    """Opens the rows of a split: "train" or "valid"."""
    trial = (SYNTHETIC_LENGTH, config.seed)  # tokens and seed, of --data synthetic
    return pretraining.open_rows(
        config.data,
        split,
        encoders.by_name(config.model).tokenizer,
        config.predictions,
        config.whole_words,
        config.next_sentence,
        trial=trial,
    )


def _open_model(config: Config, rows: Rows) -> nn.Module:
    """Returns the model of --checkpoint, or a new one of --size.

    Raises:
        InputError: the checkpoint has other tokens than the rows, or the rows are longer than its
            positions.
    """
    tokenizer = rows.text.tokenizer
    length = rows.text.length
    source = None
    if config.checkpoint:
        folder = files.local_folder(config.checkpoint)
        opened = encoder_files.open_checkpoint(folder, config.model)
        objectives.same_vocabulary(config.checkpoint, opened.tokenizer, tokenizer, config.data)
        settings = opened.config
        source = opened.source
    else:
        settings = encoders.new_configuration(config.model, config.size, tokenizer, length)
        if config.data == "synthetic":
            settings.initializer_range = SYNTHETIC_INIT

    model = objectives.language_model(settings, config.next_sentence, source)
    check_length(rows, model)
    return model


def check_length(rows: Rows, model: nn.Module) -> None:
    """Raises InputError where rows are longer than the positions of the model."""
    length = rows.text.length
    positions = architectures.positions(model)
    if length > positions:
        raise InputError(f"rows have {length} tokens; the model has {positions} positions")


def collate(limits: architectures.Limits, examples: Examples) -> dict[str, Tensor]:
    """Returns a batch of examples as tensors.

    The host checks that all ids are within the model's tables: on a device a wrong id would read
    another row.
    """
    tensors = loading.as_tensors(examples)
    limits.check(tensors)
    return tensors


def build(config: Config, data: Data, mesh: Mesh) -> State:
    """Moves the models to the device and makes the optimizer there.

    The optimizer's state exists from the start: made in the first step, it would make the second
    step another graph.
    """
    model = on_device(data.model, mesh)
    optimizer = make_optimizer(config, model)
    device.init_optimizer_state(optimizer, mesh)

    teacher = data.teacher
    if teacher is not None:
        teacher = on_device(teacher, mesh)
    return State(model, teacher, optimizer)


def on_device(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Moves a model to the device, with the layers that train and evaluate there."""
    # Chooses, for the whole process, how the layers compute attention, and the last layer for the
    # tokens that are used only. Both compile to faster programs, but some versions of the TPU's
    # compiler crash on them (docs/tpu.md).
    fast_forms = not mesh.safe_forms
    layers.use_forms(clamp_weights=fast_forms, used_tokens=fast_forms)
    model = encoder_layers.fast_layers(model)
    return device.to_device(model, mesh, encoders.rules)


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW or LAMB; biases and norms have no weight decay."""
    adamw = torch.optim.AdamW
    lamb = Lamb
    if config.moments == "bfloat16":
        adamw = moments.AdamW
        lamb = moments.Lamb

    recipe = recipe_of(config)
    groups = architectures.parameter_groups(model, recipe.weight_decay)
    betas = (BETA1, recipe.beta2)
    # device.set_lr sets the rate before each step. XLA has no foreach kernels.
    options = {"lr": config.lr, "betas": betas, "eps": ADAM_EPS, "foreach": False}
    if config.optimizer == "lamb":
        # Without bias correction, as in the authors' code: the warm-up replaces it.
        return lamb(groups, bias_correction=False, max_grad_norm=None, **options)
    return adamw(groups, **options)


def forward(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns the mean losses over a batch or micro-batch.

    With --update-every k the sum over a micro-batch is divided by 1/k of the whole batch's count.
    The mean of the k results is then sum(batch) / count(batch), though micro-batches have unequally
    many predicted tokens. Without accumulation the sum over a batch is divided by its own count.

    Args:
        batch: what MaskedText or PermutedText of data/pretraining.py lists for an example, with a
            first dimension of B; in a micro-batch also `objectives.counts` of the whole batch.
    """
    with mesh.autocast():
        return objectives.losses(
            state.model,
            state.teacher,
            batch,
            config.update_every,
            device.mean_over_processes,
        )


def train_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Updates once on a batch; returns the losses."""
    losses = forward(state, batch, config, mesh)
    losses["loss"].backward()
    update(state, config)
    state.optimizer.zero_grad(set_to_none=True)
    return {name: loss.detach() for name, loss in losses.items()}


def update(state: State, config: Config) -> dict[str, Tensor]:
    """Updates the parameters from their gradients; returns the metrics of this, which
    `AccumulatedStep` adds to those of `forward`: there are none."""
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), recipe_of(config).clip)
    state.optimizer.step()
    return {}


def eval_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns sums over the rows of a batch, without padding: "loss" and "accuracy" over the
    "predicted" tokens; with --next-sentence also "next_sentence_accuracy" over the "rows"."""
    with torch.no_grad(), mesh.autocast():
        return objectives.scores(state.model, batch)


def check_evaluation(data: Data, config: Config, mesh: Mesh) -> None:
    """Reads the first and the last rows that are evaluated; raises InputError where an evaluation
    would."""
    batches = loading.first_and_last(
        data.eval,
        config.batch_size,
        mesh,
        seed=config.seed,
        micro_batches=config.update_every,  # of each batch, as in training
        collate=partial(collate, architectures.limits(data.model)),
    )
    predicted = 0
    for batch in batches:
        is_predicted = batch["weights"] * batch["mask"][:, None]
        predicted += int(is_predicted.sum())
    if not device.over_hosts(mesh, predicted).total:
        raise InputError(
            f"no token of the first and last validation rows of {config.data} can be predicted"
        )


def evaluate(
    eval_fn: Callable, state: State, rows: loading.Dataset, config: Config, mesh: Mesh
) -> dict[str, float]:
    """Returns mean loss (nats) and accuracy. The masks depend on (seed, row) alone: they are the
    same in every evaluation.

    Args:
        eval_fn: the compiled eval_step.
    """
    state.model.eval()
    loader = loading.parallel_loader(
        rows,
        config.batch_size,
        mesh,
        train=False,
        seed=config.seed,
        micro_batches=config.update_every,  # of each batch, as in training
        collate=partial(collate, architectures.limits(state.model)),
        workers=config.workers,
    )
    with loader:
        sums = [eval_fn(state, batch, config, mesh) for batch in loader]
        totals = device.fetch_sums(sums)
    state.model.train()

    denominators = {
        "loss": "predicted",
        "accuracy": "predicted",
        "next_sentence_accuracy": "rows",
    }
    metrics = {}
    for name, denominator in denominators.items():
        if name in totals:
            metrics[name] = totals[name] / totals[denominator]
    return metrics


def metric_names(config: Config) -> list[str]:
    """Returns the names of what `evaluate` returns, in its order."""
    names = ["loss", "accuracy"]
    if config.next_sentence:
        names.append("next_sentence_accuracy")
    return names


def export(folder: str, state: State, data: Data, config: Config, mesh: Mesh) -> None:
    """Writes what transformers and `train.glue --checkpoint` load; for fairseq-roberta also what
    fairseq loads."""
    # All hosts call it; the main one gets the weights.
    weights = checkpoint.to_host(
        state.model.state_dict(), layers=mesh.layers, is_needed=mesh.main_process
    )
    if not mesh.main_process:
        return

    tokenizer = data.train.text.tokenizer
    write_folder = encoders.by_name(config.model).write_folder

    def save(local: str) -> None:
        encoder_files.save(local, state.model, weights, tokenizer, write_folder)

    files.write_folder(folder, save)


def with_teacher(config: Config, mesh: Mesh) -> Config:
    """Pretrains a teacher for a trial, which has no --teacher: calls `main` for a run of its own,
    before the student's. The same flags find that run again.

    Returns:
        The config, with the export of that run as its teacher.
    """
    config_of_both = replace(config, checkpoint="", best="", patience=0)  # the student's alone
    identity = {}  # all that the teacher's numbers depend on
    for field in fields(config_of_both):
        value = getattr(config_of_both, field.name)
        is_as_ever = field.name in NEWER and value == field.default
        if field.name not in (*MAY_CHANGE, *FIELDS, *OF_STUDENT) and not is_as_ever:
            identity[field.name] = value
    fingerprint = zlib.crc32(repr(identity).encode())
    name = f"teacher-{fingerprint:08x}"
    main(replace(config_of_both, model=encoders.by_name(config.model).teacher, name=name))

    device.wait_for_hosts(mesh)  # the main process has now written the export
    device.graph_report(reset=True)  # the student's report does not count the teacher's graphs
    return replace(config, teacher=f"{config.runs}/{name}/export")


def open_evaluation(config: Config, run: FinishedRun) -> Data:
    """Opens the rows of --split, and the model of a run's export.

    Raises:
        InputError: the rows have other tokens than the model.
    """
    split = splits.wanted(config.split, known=("train", "valid"))
    rows = _open_rows(config, split or "valid")
    exported = encoder_files.open_checkpoint(run.local_export(), "auto")
    tokenizer = rows.text.tokenizer
    objectives.same_vocabulary(run.path, exported.tokenizer, tokenizer, config.data)
    model = objectives.language_model(exported.config, config.next_sentence, exported.source)
    check_length(rows, model)
    # Nothing is trained, neither on these rows nor by a teacher.
    return Data(train=rows, eval=rows, model=model, teacher=None)


def evaluate_run(config: Config, mesh: Mesh) -> dict[str, float]:
    """Evaluates the run --evaluate by its export; returns the metrics, as `main` does."""
    run = FinishedRun(config.evaluate)
    data = open_evaluation(config, run)
    check_evaluation(data, config, mesh)
    text = data.eval.text
    run.announce(mesh, config.data, f"{len(text):,} rows of {text.length} tokens", text)

    state = State(on_device(data.model, mesh), teacher=None, optimizer=None)
    eval_fn = device.compiled(eval_step, mesh)
    metrics = evaluate(eval_fn, state, data.eval, config, mesh)
    return run.record(config, mesh, len(text), metrics)


def benchmark(config: Config, data: Data) -> Benchmark | None:
    """Returns what --log mlperf says of a run: MLPerf Training's BERT, or None.

    Its rules are for LAMB: AdamW's numbers have no names there.
    """
    if config.model != "bert":
        return None
    hyperparameters = {
        "seed": config.seed,
        "gradient_accumulation_steps": config.update_every,
        "max_sequence_length": data.train.text.length,
        "opt_name": config.optimizer,
        "opt_base_learning_rate": config.lr,
        "opt_learning_rate_training_steps": config.steps,
        "opt_learning_rate_warmup_steps": config.warmup_steps,
        "num_warmup_steps": config.warmup_steps,
        "start_warmup_step": 0,
    }
    if config.optimizer == "lamb":
        recipe = recipe_of(config)
        hyperparameters |= {
            "opt_lamb_epsilon": ADAM_EPS,
            "opt_lamb_beta_1": BETA1,
            "opt_lamb_beta_2": recipe.beta2,
            "opt_lamb_weight_decay_rate": recipe.weight_decay,
            "opt_lamb_learning_rate_decay_poly_power": 1.0,
        }
    return Benchmark(
        name="bert",
        metric="accuracy",
        target=0.72,
        train_samples=len(data.train),
        eval_samples=len(data.eval),
        batch_size=config.batch_size,
        samples_per_epoch=1,
        hyperparameters=hyperparameters,
    )


def headline(config: Config, data: Data, steps_per_epoch: int) -> str:
    """Returns what a run says first."""
    text = data.train.text
    epochs = config.steps / steps_per_epoch
    sources = splits.said(text, data.eval.text)
    return (
        f"{config.model} on {config.data}: "
        f"{len(text):,} rows of {text.length} tokens, {data.train.predictions} predicted, "
        f"{data.model.num_parameters():,} parameters, "
        f"{config.steps:,} updates of {config.batch_size} rows ({epochs:.1f} epochs){sources}"
    )


def main(config: Config) -> dict[str, float]:
    """Pretrains and exports, or evaluates a finished run; returns the final metrics of the
    validation rows."""
    config = validate(resolve_config(config, EVALUATE_FLAGS))
    mesh = device.setup(
        config.seed,
        config.precision,
        config.strict,
        config.device,
        config.layout,
        vmem_kib=VMEM_KIB,
        safe_forms=config.safe_forms,
    )
    if config.evaluate:
        return evaluate_run(config, mesh)

    # ---- the data --------------------------------------------------------------------------------
    if encoders.by_name(config.model).teacher and not config.teacher:
        config = with_teacher(config, mesh)
    data = open_data(config)
    steps_per_epoch = loading.steps_per_epoch(
        data.train, config.batch_size, mesh, micro_batches=config.update_every
    )
    total_steps = config.steps
    check_evaluation(data, config, mesh)

    # ---- the run's folder ------------------------------------------------------------------------
    kind = "synthetic" if config.data == "synthetic" else "pretraining"
    run = Run(
        config,
        mesh,
        name=f"{config.model}-{kind}",
        headline=headline(config, data, steps_per_epoch),
        may_differ=MAY_CHANGE,
        sources=splits.sources_of(data.train.text, data.eval.text),
        total_steps=total_steps,
        metrics=metric_names(config),
        benchmark=benchmark(config, data),
    )
    if run.finished:
        return run.print_summary()

    # ---- the model and its steps -----------------------------------------------------------------
    state = build(config, data, mesh)
    start = run.resume(state.model, state.optimizer, examples=len(data.train), keep=config.keep)
    if config.update_every > 1:
        means = ("loss", "words")  # the losses that `forward` returns for every model
        train_fn = accumulate.AccumulatedStep(forward, update, state, means, mesh)
    else:
        train_fn = accumulate.SeededStep(train_step, mesh)
    eval_fn = device.compiled(eval_step, mesh)
    state.model.train()

    def evaluation(step: int) -> dict[str, float]:
        """Evaluates the state after `step`, and records it."""
        with run.pause():
            metrics = evaluate(eval_fn, state, data.eval, config, mesh)
        run.evaluation(step, **metrics)
        return metrics

    # ---- the loop --------------------------------------------------------------------------------
    # Tokens of each row. The loader adds them up over the micro-batches of a batch, and `forward`
    # divides by these sums.
    counts_per_row = objectives.counts if config.update_every > 1 else None
    loader = loading.parallel_loader(
        data.train,
        config.batch_size,
        mesh,
        train=True,
        seed=config.seed,
        start=start,
        stop=total_steps,
        micro_batches=config.update_every,  # cuts a batch
        update_every=config.update_every,  # yields those of an update together
        counts_per_row=counts_per_row,
        collate=partial(collate, architectures.limits(state.model)),
        workers=config.workers,
    )
    # All hosts of a pod agree on a stop signal, about every ten micro-batches.
    stop_every = max(10 // config.update_every, 1)  # in updates
    with run.training(loader, stop_every=stop_every):
        metrics = {}  # of the last evaluation in this start
        if run.evaluation_due:  # the run ended between a checkpoint and its evaluation
            metrics = evaluation(start)

        for step, micro_batches in enumerate(run.batches(loader), start + 1):
            lr = learning_rate(config, step - 1)
            device.set_lr(state.optimizer, lr)
            step_metrics = train_fn(state, micro_batches, config, mesh)

            if step == 1 or step % config.log_every == 0 or step == total_steps:
                run.log(
                    step,
                    examples=step * config.batch_size,
                    input_wait=loader.input_wait(),
                    lr=lr,
                    **step_metrics,
                )
            evaluates = step % config.eval_every == 0 or step == total_steps
            is_due = config.save_every > 0 and step % config.save_every == 0
            run.checkpoint(step, due=is_due, evaluates=evaluates)
            if evaluates:
                metrics = evaluation(step)

        # ---- the end -----------------------------------------------------------------------------
        run.checkpoints.wait()
        metrics = run.load_best() or metrics  # with --best: of the state that it has loaded
        if not metrics:  # the run ended after the last step, before the export
            metrics = evaluate(eval_fn, state, data.eval, config, mesh)
        export(f"{run.path}/export", state, data, config, mesh)
        run.finish(metrics)
    return metrics


PRESETS = {
    "full": ("the model's published recipe; needs --data and accelerators", Config()),
    "lamb": ("BERT with batches of 32k and LAMB", LAMB),
    "tiny": ("a small network and a small language: two minutes on a CPU", TINY),
}

if __name__ == "__main__":
    cli.run(main, PRESETS)
