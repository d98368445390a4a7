"""SQuAD: fine-tuning BERT, DistilBERT, RoBERTa, XLNet or another encoder to find the answer to a
question in a text, on SQuAD 1.1 or 2.0, or on your own questions.

paper     Rajpurkar et al. 2016 (arXiv:1606.05250), 2018 (arXiv:1806.03822); recipes with their
          sources: models/encoders
data      SQuAD's JSON files, the Hugging Face hub ids rajpurkar/squad and rajpurkar/squad_v2, or a
          folder that Hugging Face's `datasets` saved; of your own: the same JSON, see data/squad.py
run       python -m train.squad tiny                                    a synthetic task: a minute
                                                                        on two CPU cores
          python -m train.squad full --data rajpurkar/squad             on a TPU VM
          python -m train.squad full --data my_questions.json
result    of published checkpoints: not run yet (they could not be downloaded here). BERT-base has
          F1 88.5 and EM 80.8 on SQuAD 1.1's dev set (Devlin et al. 2019, table 2)
"""

if __name__ == "__main__" and not __package__:  # by its path: the imports below are not found
    raise SystemExit(
        "error: in the project's folder run it as a module: python -m train.squad tiny"
    )

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from data import splits, squad, squad_answers, vocabulary
from errors import InputError
from models import architectures, encoder_files, encoder_layers, encoders, layers
from models import question_answering as spans
from models.encoders.record import QuestionAnswering
from train.common import accumulate, checkpoint, cli, device, files, loading
from train.common.batches import Examples
from train.common.evaluation import FinishedRun, resolve_config
from train.common.mesh import WHOLE, Layout, Mesh
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    model: Literal[encoders.NAMES] = "bert"  # auto: the architecture of --checkpoint (docs/data.md)
    data: str = ""  # JSON file, folder or URL; saved by HF datasets; HF hub id; "synthetic"
    version: Literal["", *squad.VERSIONS] = ""  # of SQuAD, where --data has both; "": it has one
    evaluate: str = ""  # a finished run's folder: nothing is trained, its export is evaluated
    split: str = ""  # of --data, with --evaluate: train, valid, test; "": as in training
    checkpoint: str = ""  # HF hub id or folder; "": the recipe's
    max_length: int | None = None  # tokens of a row: question and window; None: the recipe
    stride: int = 128  # tokens that neighbouring windows share; not BERT's doc_stride: docs/data.md
    max_question: int = 64  # tokens that a question is cut to
    n_best: int = 20  # candidates for an answer, and first and last tokens that make them
    max_answer: int = 30  # tokens of the longest answer
    null_threshold: float | None = None  # no answer, if its score is more above the best; None: 0
    batch_size: int | None = None  # rows per update, over all devices; None: model's recipe
    update_every: int = 1  # gradient-accumulation steps: micro-batches that a batch is cut into
    epochs: float | None = None  # passes over the data; None: the recipe
    lr: float | None = None  # peak learning rate; None: the recipe
    warmup: float | None = None  # share of steps that lr rises in; then it falls to 0; None: recipe
    weight_decay: float | None = None  # of AdamW; not of biases and norms; None: the recipe
    clip: float | None = None  # largest norm of all gradients; inf: not clipped; None: the recipe
    best: str = ""  # exports the best by f1, exact_match, -loss, …; "": the last
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
    max_length=32,
    stride=10,
    max_question=12,
    batch_size=32,
    epochs=6,
    lr=2e-3,
    warmup=0.1,
    weight_decay=0.01,
    clip=1.0,
)

# Fields that a resumed run may change: these do not change the trained weights.
MAY_CHANGE = ("workers", "log_every", "save_every", "strict", "layout", "safe_forms")
# Flags that may be given with --evaluate; all others are the run's.
EVALUATE_FLAGS = (
    "version",
    "batch_size",
    "update_every",
    "n_best",
    "max_answer",
    "null_threshold",
)
ANSWERS = "answers.json"  # of an export: how `make predict` cuts windows, and searches in them
# Fields whose None is the recipe's value, which may depend on the data.
OF_RECIPE = ("max_length", "batch_size", "epochs", "lr", "warmup", "weight_decay", "clip")
ADAM_EPS = 1e-6  # of BERT's and DistilBERT's code, and in RoBERTa's and XLNet's papers
SYNTHETIC_SIZE = "tiny"  # a trial's network
SYNTHETIC_WORDS = 400  # a trial's largest vocabulary
SYNTHETIC_INIT = 0.1  # the spread of a trial's new weights


class Data(NamedTuple):
    """What a run reads."""

    train: squad.Windows | None  # None: a finished run is evaluated
    eval: dict[str, squad.Windows]  # by split
    questions: dict[str, squad.Questions]  # those that are evaluated
    trained: squad.Questions | None  # those that are trained on
    model: nn.Module  # on the host
    tokenizer: PreTrainedTokenizerBase
    may_be_none: bool  # some questions have no answer
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


def recipe_of(config: Config) -> QuestionAnswering:
    """Returns the model's published recipe; that of SQuAD 2.0 where --version, or the name of
    --data, says so."""
    recipe = encoders.by_name(config.model).question_answering
    return recipe.of_data(config.version == "2.0")


def with_recipe(config: Config) -> Config:
    """Returns the config with the recipe's numbers where a field is None, and with the version that
    the name of --data says."""
    if not config.version and not config.evaluate:
        config = replace(config, version=squad.version_of(config.data))
    recipe = recipe_of(config)
    for name in OF_RECIPE:
        if getattr(config, name) is None:
            config = replace(config, **{name: getattr(recipe, name)})
    return config


def validate(config: Config) -> Config:
    """Returns the config with the model's recipe where a field is None; raises InputError where a
    value is outside its range."""
    cli.need_data(config, "SQuAD's files, rajpurkar/squad, or a file of your own in their format")
    config = with_recipe(config)
    cli.at_least(config, 1, "max_length", "max_question", "n_best", "max_answer")
    cli.at_least(config, 1, "batch_size", "update_every", "log_every", "keep")
    cli.at_least(config, 0, "stride", "lr", "weight_decay", "eval_every", "save_every", "seed")
    cli.at_least(config, 0, "patience")
    cli.at_least(config, -1, "workers")
    cli.at_least(config, 0, "warmup", below=1)
    cli.at_least(config, 0, "clip", above=True)
    cli.at_least(config, 0, "epochs", above=True, below=math.inf)
    if config.null_threshold is not None and not math.isfinite(config.null_threshold):
        raise InputError(f"--null-threshold is {config.null_threshold}; it must be a number")

    if config.checkpoint == "new":  # which train/glue.py and train/tagging.py take
        raise InputError(
            "--checkpoint is new; from new weights no answers are learnt from a user's texts: give "
            "a hub id or the folder of a pretrained checkpoint, such as one of TASK=pretrain"
        )
    if not config.checkpoint and config.data != "synthetic":
        usual = encoders.by_name(config.model).fine_tuning.checkpoint
        if not usual:
            raise InputError(f"--checkpoint is missing: --model {config.model} needs one")
        config = replace(config, checkpoint=usual)
    return config


def window_limits(config: Config) -> squad.Limits:
    """Returns how questions and contexts are cut into rows."""
    return squad.Limits(config.max_length, config.stride, config.max_question)


def search_limits(config: Config) -> squad_answers.SearchLimits:
    """Returns how answers are searched for."""
    threshold = config.null_threshold or 0.0
    return squad_answers.SearchLimits(config.n_best, config.max_answer, threshold)


def open_data(config: Config) -> Data:
    """Opens the splits and the model, and cuts the splits into windows with its tokenizer."""
    opened = squad.open_splits(config.data, config.version, config.seed)
    encoder = _open_encoder(config, opened.train)
    found = spans.span_model(encoder.settings, encoder.source)
    check_positions(found.model, config)

    train = squad.Windows(opened.train, encoder.tokenizer, window_limits(config))
    head_message = ""
    if found.why_new:
        head_message = f"the head is new: {found.why_new}"
        # A checkpoint that never had a head may be evaluated untrained, but the user is told.
        if config.lr == 0:
            head_message += "; --lr 0 does not train it"
    return Data(
        train=train,
        eval=windows_of(opened.eval, encoder.tokenizer, config),
        questions=opened.eval,
        trained=opened.train,
        model=found.model,
        tokenizer=encoder.tokenizer,
        may_be_none=opened.has_unanswerable,
        head_message=head_message,
    )


def windows_of(
    questions: dict[str, squad.Questions], tokenizer: PreTrainedTokenizerBase, config: Config
) -> dict[str, squad.Windows]:
    """Returns the windows of each split that is evaluated."""
    limits = window_limits(config)
    found = {}
    for split, of_split in questions.items():
        found[split] = squad.Windows(of_split, tokenizer, limits, keep_offsets=True)
    return found


def check_positions(model: nn.Module, config: Config) -> None:
    """Raises InputError where rows are longer than the model can take."""
    positions = architectures.positions(model)
    if config.max_length > positions:
        raise InputError(
            f"--max-length is {config.max_length}; the model has {positions} positions"
        )


@dataclass(frozen=True)
class OpenedEncoder:
    """What a model is made of."""

    settings: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    source: encoder_files.Source | None  # of the weights; None: all are new


def _open_encoder(config: Config, questions: squad.Questions) -> OpenedEncoder:
    """Opens --checkpoint. In a trial the tokenizer learns the words of the training questions."""
    if config.checkpoint:
        folder = files.local_folder(config.checkpoint)
        compiled = config.device == "xla"  # refuses architectures that no compiled step can run
        opened = encoder_files.open_checkpoint(folder, config.model, compiled=compiled)
        return OpenedEncoder(opened.config, opened.tokenizer, opened.source)

    lines = []
    for row in questions.rows:
        lines += [row.text, row.context]
    kind = encoders.by_name(config.model).tokenizer
    # Repeatable, since other hosts and a resumed run learn it, too.
    tokenizer = vocabulary.learn(lines, kind, SYNTHETIC_WORDS, repeatable=True)
    settings = encoders.new_configuration(
        config.model, SYNTHETIC_SIZE, tokenizer, config.max_length
    )
    settings.initializer_range = SYNTHETIC_INIT
    return OpenedEncoder(settings, tokenizer, source=None)


def check_words(tokenizer: PreTrainedTokenizerBase, mesh: Mesh) -> None:
    """Raises InputError where hosts of a pod have learnt different words."""
    words = repr(sorted(tokenizer.get_vocab().items()))
    checksum = zlib.crc32(words.encode())
    device.same_on_all_hosts(mesh, "the words that each has learnt (their CRC-32)", checksum)


def collate(limits: architectures.Limits, examples: Examples) -> dict[str, Tensor]:
    """Returns a batch of windows as tensors.

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
    betas = (0.9, recipe_of(config).beta2)
    # device.set_lr sets the rate before each step. XLA has no foreach kernels.
    optimizer = torch.optim.AdamW(groups, config.lr, betas, ADAM_EPS, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    return State(model, optimizer)


def on_device(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Moves a model to the device, with the layers that train and evaluate there."""
    # Chooses, for the whole process, how the layers compute attention. Clamped weights compile to
    # faster programs, but some versions of the TPU's compiler crash on them (docs/tpu.md).
    layers.use_forms(clamp_weights=not mesh.safe_forms)
    return device.to_device(encoder_layers.fast_layers(model), mesh, encoders.rules)


def forward(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns the mean "loss" over a batch or micro-batch of B rows. A mean, since all
    micro-batches have equally many rows.

    Args:
        batch: "input_ids", "attention_mask" and "token_type_ids" [B, T]; "start" and "end" [B].
    """
    with mesh.autocast():
        logits = spans.compute_logits(state.model, batch)
    losses = spans.compute_losses(logits, batch["start"], batch["end"])
    return {"loss": losses.mean()}


def train_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Updates once on a batch; returns the mean loss and the gradients' norm."""
    metrics = forward(state, batch, config, mesh)
    metrics["loss"].backward()
    metrics = {"loss": metrics["loss"].detach()}
    metrics |= update(state, config)
    state.optimizer.zero_grad(set_to_none=True)
    return metrics


def update(state: State, config: Config) -> dict[str, Tensor]:
    """Updates the parameters from their gradients; returns the norm of these."""
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.clip)
    state.optimizer.step()
    return {"gradient_norm": norm.detach()}


def eval_step(state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh) -> Tensor:
    """Returns the logits [B, 2, T] of the whole batch, of first and last tokens: every host can
    read all of them."""
    with torch.no_grad(), mesh.autocast():
        logits = spans.compute_logits(state.model, batch)
    return device.whole_batch(logits.float(), mesh)


def check_evaluation(data: Data, config: Config, mesh: Mesh) -> None:
    """Reads the first and the last windows of each split that is evaluated; raises InputError where
    an evaluation would."""
    collate_fn = partial(collate, architectures.limits(data.model))
    for windows in data.eval.values():
        loading.first_and_last(
            windows,
            config.batch_size,
            mesh,
            micro_batches=config.update_every,  # of each batch, as in training
            collate=collate_fn,
        )


def evaluate(
    eval_fn: Callable, state: State, data: Data, config: Config, mesh: Mesh
) -> dict[str, float]:
    """Returns SQuAD's metrics, and the mean loss of the windows.

    Args:
        eval_fn: the compiled eval_step.
    """
    metrics = {}
    limits = search_limits(config)
    collate_fn = partial(collate, architectures.limits(state.model))
    state.model.eval()
    for split, windows in data.eval.items():  # of which there is one
        loader = loading.parallel_loader(
            windows,
            config.batch_size,
            mesh,
            train=False,
            micro_batches=config.update_every,  # of each batch, as in training
            collate=collate_fn,
            workers=config.workers,
        )
        with loader:
            logits_of_batches = [eval_fn(state, batch, config, mesh) for batch in loader]
        logits = torch.cat(device.read(logits_of_batches))[: len(windows)]  # without padding

        questions = data.questions[split]
        found = squad_answers.search_all(
            questions, windows, logits.numpy(), limits, data.may_be_none
        )
        metrics |= squad_answers.score(questions, found, data.may_be_none)
        start, end = torch.from_numpy(windows.places()).unbind(1)
        metrics["loss"] = spans.compute_losses(logits, start, end).mean().item()
    state.model.train()
    return metrics


def metric_names(data: Data) -> list[str]:
    """Returns the names of what `evaluate` returns, in its order."""
    return [*squad_answers.metric_names(data.may_be_none), "loss"]


def export(folder: str, state: State, data: Data, config: Config, mesh: Mesh) -> None:
    """Writes what transformers' AutoModelForQuestionAnswering loads, and the pipeline
    "question-answering" of transformers 4; and ANSWERS, which says how it was evaluated."""
    # All hosts call it; the main one gets the weights.
    weights = checkpoint.to_host(
        state.model.state_dict(), layers=mesh.layers, is_needed=mesh.main_process
    )
    if not mesh.main_process:
        return

    # What make predict does as the evaluation of the run.
    evaluated = asdict(window_limits(config)) | asdict(search_limits(config))
    evaluated |= {"may_be_none": data.may_be_none, "precision": config.precision}

    def save(local: str) -> None:
        encoder_files.save(local, state.model, weights, data.tokenizer)
        Path(local, ANSWERS).write_text(json.dumps(evaluated, indent=1) + "\n")

    files.write_folder(folder, save)


def open_evaluation(config: Config, run: FinishedRun) -> Data:
    """Opens the model of a run's export, and cuts the questions of --split into windows.

    Raises:
        InputError: the export is not whole, or its files do not say how it was trained.
    """
    compiled = config.device == "xla"
    folder = run.local_export()
    exported = encoder_files.open_checkpoint(folder, "auto", compiled=compiled)
    found = spans.span_model(exported.config, exported.source)
    if found.why_new:
        raise InputError(f"{found.why_new}; give a run whose export is whole")
    split = splits.wanted(config.split)
    is_own = run.owns(config.data)
    opened = squad.open_evaluation(config.data, config.version, split, config.seed, is_own)

    # A model that may answer that there is none does so on any data.
    may_be_none = _read_may_be_none(Path(folder, ANSWERS))
    return Data(
        train=None,
        eval=windows_of(opened.eval, exported.tokenizer, config),
        questions=opened.eval,
        trained=None,
        model=found.model,
        tokenizer=exported.tokenizer,
        may_be_none=may_be_none or opened.has_unanswerable,
    )


def _read_may_be_none(path: Path) -> bool:
    """Returns whether the questions of a run may have no answer, by its ANSWERS."""
    try:
        return bool(json.loads(path.read_text())["may_be_none"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged: {error!r}; copy the run again") from error


def evaluate_run(config: Config, mesh: Mesh) -> dict[str, float]:
    """Evaluates the run --evaluate by its export; returns the metrics, as `main` does."""
    run = FinishedRun(config.evaluate)
    data = open_evaluation(config, run)
    check_evaluation(data, config, mesh)
    (questions,) = data.questions.values()
    (windows,) = data.eval.values()
    run.announce(mesh, config.data, describe(questions, windows), windows)

    state = State(on_device(data.model, mesh), optimizer=None)
    eval_fn = device.compiled(eval_step, mesh)
    metrics = evaluate(eval_fn, state, data, config, mesh)
    return run.record(config, mesh, len(questions), metrics)


def describe(questions: squad.Questions, windows: squad.Windows) -> str:
    """Returns in words how many questions there are, and what they are cut into."""
    limits = windows.limits
    without = f"{questions.unanswerable:,} without an answer, " if questions.unanswerable else ""
    return (
        f"{len(questions):,} questions ({without}{windows.cut:,} cut to {limits.max_question} "
        f"tokens) in {len(windows):,} windows of {limits.max_length} tokens"
    )


def headline(config: Config, data: Data, total_steps: int) -> str:
    """Returns what a run of `total_steps` says first."""
    sources = splits.said(data.train, *data.eval.values())
    return (
        f"{config.model} on squad: {describe(data.trained, data.train)}, "
        f"in batches of {config.batch_size} with {data.train.padding:.1%} padding, "
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
    if not config.checkpoint:
        check_words(data.tokenizer, mesh)
    steps_per_epoch = loading.steps_per_epoch(
        data.train, config.batch_size, mesh, micro_batches=config.update_every
    )
    total_steps = math.ceil(config.epochs * steps_per_epoch)
    check_evaluation(data, config, mesh)

    # ---- the run's folder ------------------------------------------------------------------------
    suffix = "-synthetic" if config.data == "synthetic" else ""
    run = Run(
        config,
        mesh,
        name=f"{config.model}-squad{suffix}",
        headline=headline(config, data, total_steps),
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
    if config.update_every > 1:
        train_fn = accumulate.AccumulatedStep(forward, update, state, ("loss",), mesh)
    else:
        train_fn = accumulate.SeededStep(train_step, mesh)
    eval_fn = device.compiled(eval_step, mesh)
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
        config.batch_size,
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
                    examples=step * config.batch_size,
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
