"""The Transformer on WMT English-German: from text to BLEU, with fairseq's numbers.

paper     Vaswani et al. 2017, Attention is all you need (arXiv:1706.03762);
          Ott et al. 2018 (arXiv:1806.00187)
recipes   base    Vaswani et al., tables 2 and 3: 25,000 source and target tokens per batch,
                  100,000 updates
          big     fairseq examples/scaling_nmt: 459,000 tokens per batch, rate 1e-3;
                  28.6 sacreBLEU on newstest2014 (Ott)
          wmt18   fairseq examples/backtranslation, without its synthetic data;
                  29.0 sacreBLEU on newstest2017
          tpu     base with the two shapes of Google's TPU tutorial for fairseq: on eight cores
                  2,048 rows of 64 tokens and 4,096 rows of 32
data      a folder that `make data DATASET=wmt18 DATA=…` makes from text, or fairseq-preprocess
run       python -m train.transformer tiny                       a synthetic language: a minute on
                                                                 two CPU cores
          python -m train.transformer base --data /data/wmt18    on a TPU VM
result    the published recipes: not run yet; tiny and small real data: docs/results.md
"""

if __name__ == "__main__" and not __package__:  # by its path: the imports below are not found
    raise SystemExit(
        "error: in the project's folder run it as a module: python -m train.transformer tiny"
    )

import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from data import batching, splits, wmt
from data.fairseq_format import PIECES
from data.languages import TOKENIZERS
from errors import InputError
from models import fairseq, layers
from models.transformer import ARCHITECTURES, Transformer, label_smoothed_loss
from models.transformer import rules as partition_rules
from train import translate
from train.common import accumulate, checkpoint, cli, device, files, loading
from train.common.evaluation import FinishedRun, resolve_config
from train.common.mesh import WHOLE, Layout, Mesh
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    data: str = ""  # folder or URL that `make data` or fairseq-preprocess made, or "synthetic"
    arch: Literal[tuple(ARCHITECTURES)] = "transformer_wmt_en_de"  # sizes by fairseq's name
    evaluate: str = ""  # a finished run's folder: nothing is trained, its export is evaluated
    split: str = ""  # of --data, with --evaluate: train, valid, test; "": as in training
    share_embeddings: Literal["all", "decoder", "none"] = "all"  # all: one joint dictionary
    dropout: float = 0.1  # of embeddings and of each sub-layer's output
    weights: str = ""  # checkpoint of fairseq or of an export; it must fit arch and dictionaries
    lengths: tuple[int, ...] = ()  # tokens of a sentence, a compiled shape each; (): from the data
    batch_tokens: int = 26_624  # per batch and side; a batch of length L has batch_tokens / L rows
    pack: bool = True  # several pairs per row, of the longest length; else one, a shape per length
    update_every: int = 1  # gradient-accumulation steps: whole batches per update; none is cut
    updates: int = 100_000  # updates of the weights
    lr: float = 7e-4  # peak learning rate
    warmup_updates: int = 4000  # linear; then with the inverse square root of the update
    label_smoothing: float = 0.1  # of the loss, in evaluation too (as fairseq); ppl is without it
    beam: int = 4  # hypotheses per sentence in evaluation
    length_penalty: float = 0.6  # exponent of the length that divides a hypothesis' log-probability
    bleu_tokenizer: Literal["", *TOKENIZERS] = ""  # sacrebleu's --tokenize; "": by language
    pieces: Literal["", *PIECES] = ""  # how symbols make words; "": seen from their marks, ▁ or @@
    precision: Literal["bfloat16", "float32", "fast_float32"] = "bfloat16"  # train/common/device.py
    device: Literal["xla", "cpu", "cuda", "tpu"] = "xla"  # xla: TPU, CPU; tpu: TorchTPU, never run
    layout: Layout = WHOLE  # --mesh, --shard-state, --remat: docs/large_models.md
    seed: int = 0  # of the initial weights, the order of the data and dropout
    workers: int = 1  # processes per host that make batches; -1: one per core, 0: none
    log_every: int = 100  # updates between lines of metrics
    eval_every: int = 5000  # updates between evaluations
    save_every: int = 1500  # updates between checkpoints; there is one at each evaluation, too
    keep: int = 5  # checkpoints of save_every, and the last, that stay; their mean is exported
    best: str = ""  # exports the best checkpoint by bleu, -loss, …; "": the mean of --keep
    patience: int = 0  # evaluations without a better --best that end the training; 0: none do
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes: docs/tpu.md


BIG = Config(
    arch="transformer_vaswani_wmt_en_de_big",
    dropout=0.3,
    batch_tokens=65_536,
    update_every=8,
    updates=40_000,
    lr=1e-3,
)
WMT18 = replace(BIG, updates=30_000, beam=5, length_penalty=1.0)
TPU = Config(lengths=(32, 64), batch_tokens=131_072, pack=False, lr=5e-4)
TINY = Config(
    **cli.TRIAL,
    arch="transformer_tiny",
    dropout=0.0,
    lengths=(8, 16),
    batch_tokens=1024,
    pack=False,
    updates=700,
    lr=4e-3,
    warmup_updates=100,
    beam=2,
    log_every=20,
    eval_every=350,
    save_every=50,
    keep=2,
)

# Fields that a resumed run may change: these do not change the trained weights. save_every and keep
# do: they choose the checkpoints whose mean is exported.
MAY_CHANGE = ("workers", "log_every", "strict", "layout", "safe_forms")
# Flags that may be given with --evaluate; all others are the run's. Of memory, and of how sentences
# are translated and scored.
EVALUATE_FLAGS = ("batch_tokens", "beam", "length_penalty", "bleu_tokenizer")
# The vector memory of a TPU core that one fusion may use: v6e's default, set on other TPUs, too,
# whose default is less (docs/tpu/findings.md).
VMEM_KIB = 32_768
# v6e. The two products that take the gradient of the logits read it from memory there; on other
# TPUs each computes it again. Storing it takes 9 % fewer cycles on v6e than computing it twice, and
# more cycles on the others (docs/tpu/findings.md).
LOGIT_GRADIENT_STORED_ON = "TPU v6 lite"
ADAM = {"betas": (0.9, 0.98), "eps": 1e-8}  # as in fairseq's recipes
WARMUP_INIT_LR = 1e-7  # likewise
METRICS = ("bleu", "loss", "ppl")  # of an evaluation during the training, of the split valid
LARGEST_EXPONENT = 700  # math.exp of more overflows


class Data(NamedTuple):
    """What a run reads: sentence pairs of data/wmt.py."""

    train: wmt.TranslationPairs
    eval: dict[str, wmt.TranslationPairs]  # "valid", and "test" if it is there


class State(NamedTuple):
    """What a step works on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None  # None: nothing is trained


def learning_rate(config: Config, step: int) -> float:
    """Returns the rate at 0-based update `step`: fairseq's inverse_sqrt."""
    if step < config.warmup_updates:
        rise = config.lr - WARMUP_INIT_LR
        return WARMUP_INIT_LR + rise * step / config.warmup_updates
    return config.lr * math.sqrt(config.warmup_updates / step)


def validate(config: Config) -> Config:
    """Returns the config; raises InputError where a value is outside its range."""
    cli.at_least(config, 1, "batch_tokens", "update_every", "updates", "warmup_updates", "beam")
    cli.at_least(config, 1, "log_every", "eval_every", "save_every", "keep")
    cli.at_least(config, 0, "lr", "seed", "length_penalty", "patience")
    cli.at_least(config, -1, "workers")
    cli.at_least(config, 0, "dropout", "label_smoothing", below=1)

    positions = ARCHITECTURES[config.arch].max_positions
    rising = list(config.lengths) == sorted(set(config.lengths))
    possible = all(2 <= length <= positions for length in config.lengths)
    if not rising or not possible:
        raise InputError(
            f"--lengths are {config.lengths}; they must rise and be between 2 and {positions}"
        )
    cli.need_data(config, "a folder that `make data` made")
    return config


def open_data(config: Config) -> Data:
    """Opens the pairs of the training and the validation split, and of the test split if there is
    one."""
    if config.data == "synthetic":
        train = wmt.SyntheticPairs("train", seed=config.seed)
        valid = wmt.SyntheticPairs("valid", seed=config.seed)
        return Data(train, {"valid": valid})

    evaluated = _open_evaluated(config)
    train = wmt.open_pairs(config.data, "train", config.pieces)
    return Data(train, evaluated)


def _open_evaluated(config: Config) -> dict[str, wmt.TranslationPairs]:
    """Opens the validation split, and the test split if there is one."""
    evaluated = {}
    for split in ("valid", "test"):
        if split == "valid" or wmt.has_split(config.data, split):
            evaluated[split] = wmt.open_pairs(config.data, split, config.pieces)
    return evaluated


def compare_dictionaries(config: Config, data: Data) -> list[str]:
    """Compares the dictionaries beside --weights, as an export has them, with those of the data.

    A dictionary of the same size may have other words, or the same in another order.

    Returns:
        The names of the dictionaries that are not beside --weights: what that means, the caller
        decides.
    Raises:
        InputError: one differs.
    """
    not_found = []
    for name, content in data.train.vocabulary_files().items():
        if not name.startswith("dict."):
            continue
        path = os.path.join(os.path.dirname(config.weights), name)
        if not files.exists(path):
            not_found.append(name)
            continue

        theirs = files.read_file(path).split(b"\n")
        ours = content.split(b"\n")
        pairs = itertools.zip_longest(theirs, ours, fillvalue=b"")
        for number, (their_line, our_line) in enumerate(pairs, start=1):
            their_word = _word(their_line)
            our_word = _word(our_line)
            if their_word != our_word:
                raise InputError(
                    f"--weights {config.weights} has a different dictionary: "
                    f"line {number} of {path} is {their_word!r}, of {config.data} {our_word!r}; "
                    "give weights or data of the same dictionary"
                )
    return not_found


def _word(line: bytes) -> str:
    """Returns the word of a dictionary's line, without its count."""
    return line.rpartition(b" ")[0].decode(errors="replace")


def build(config: Config, data: Data, mesh: Mesh) -> State:
    """Makes model and optimizer on the device.

    The optimizer's state exists from the start: made in the first step, it would make the second
    step another graph.

    Raises:
        InputError: --share-embeddings does not fit the dictionaries; or --weights do not fit the
            model or the dictionaries.
    """
    model = make_model(config, data, mesh)
    # device.set_lr sets the rate before each step. XLA has no foreach kernels.
    optimizer = torch.optim.Adam(model.parameters(), config.lr, foreach=False, **ADAM)
    device.init_optimizer_state(optimizer, mesh)
    return State(model, optimizer)


def make_model(config: Config, data: Data, mesh: Mesh) -> Transformer:
    """Makes the model on the device, with --weights if they are given; raises what `build` does."""
    # Chooses, for the whole process, how the layers compute. Attention's clamped weights compile to
    # faster programs, but some versions of the TPU's compiler crash on them (docs/tpu.md).
    # Where devices share layers, a barrier before each layer of the decoder would have them add up
    # the gradient of the encoder's output as often, and not once.
    shares_layers = mesh.layers is not None and mesh.layers.axes["model"] > 1
    barrier = None if shares_layers else device.barrier()
    layers.use_forms(clamp_weights=not mesh.safe_forms, barrier=barrier)
    source = data.train.source_dictionary
    target = data.train.target_dictionary
    if config.share_embeddings == "all" and source is not target:
        raise InputError(
            f"{config.data} has two dictionaries; "
            "use --share-embeddings decoder, or a joint dictionary"
        )

    arch = replace(
        ARCHITECTURES[config.arch],
        dropout=config.dropout,
        share_embeddings=config.share_embeddings,
    )
    model = Transformer(arch, len(source), len(target))
    if config.weights:
        _, weights = fairseq.read_checkpoint(files.read_file(config.weights), config.weights)
        fairseq.load_weights(model, weights, config.weights)
        not_found = compare_dictionaries(config, data)
        if not_found and mesh.main_process:
            print(
                f"there is no {' nor '.join(not_found)} beside --weights {config.weights}: "
                f"its words are taken to be those of {config.data}, in their order",
                flush=True,
            )
    return device.to_device(model, mesh, partition_rules)


def forward(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns sums over the target tokens of a batch or micro-batch of B rows: "loss", which is
    label-smoothed, "nll", which is not, and "tokens", their number.

    Sums, since micro-batches have unequal numbers of tokens: who calls it divides by "tokens".

    Args:
        batch: "source" [B, S], "previous" and "target" [B, T]; and "source_segment" [B, S] and
            "target_segment" [B, T] where several pairs are packed into a row.
    """
    # On TPUs attention computes several short rows as one. (--pack is something else: it puts
    # several pairs into one row.) Rows are joined within each of `packing_parts` equal parts of the
    # batch only, so never with those of another device. 0: no rows are joined.
    packing_parts = 0
    if mesh.kind.startswith("TPU"):
        packing_parts = math.lcm(translate.ROWS_MULTIPLE, mesh.num_devices)
    with mesh.autocast():
        logits = state.model(
            batch["source"],
            batch["previous"],
            batch.get("source_segment"),
            batch.get("target_segment"),
            packing_parts=packing_parts,
        )
    store_gradient = mesh.kind == LOGIT_GRADIENT_STORED_ON
    return label_smoothed_loss(logits, batch["target"], config.label_smoothing, store_gradient)


def train_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Updates once on a batch; returns the mean loss and nll of its tokens."""
    sums = forward(state, batch, config, mesh)
    tokens = device.mean_over_processes(sums["tokens"])
    means = {name: sums[name] / tokens for name in ("loss", "nll")}
    means["loss"].backward()
    update(state, config)
    state.optimizer.zero_grad(set_to_none=True)
    return {name: mean.detach() for name, mean in means.items()}


def update(state: State, config: Config) -> dict[str, Tensor]:
    """Updates the parameters from their gradients; returns the metrics of this, which
    `AccumulatedStep` adds to those of `forward`: there are none."""
    state.optimizer.step()
    return {}


def eval_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns the sums of `forward`, label-smoothed as in training; padding does not count."""
    with torch.no_grad():
        return forward(state, batch, config, mesh)


def eval_plan(pairs: wmt.TranslationPairs, config: Config, mesh: Mesh) -> batching.Buckets:
    """Returns the batches in which the loss of a split is computed."""
    positions = ARCHITECTURES[config.arch].max_positions
    return translate.evaluation_plan(
        pairs.lengths, config.lengths, config.batch_tokens, positions, mesh, pairs.split
    )


def check_evaluation(data: Data, config: Config, mesh: Mesh) -> None:
    """Reads the first and the last sentences of each split that is evaluated, and constructs its
    Bleu; raises InputError where an evaluation would."""
    notes = []
    for pairs in data.eval.values():
        loading.first_and_last(pairs, eval_plan(pairs, config, mesh), mesh)
        notes += translate.Bleu(pairs, config.bleu_tokenizer).notes
    if mesh.main_process:
        for note in dict.fromkeys(notes):
            print(note, flush=True)


def evaluate(
    eval_fn: Callable,
    translator: translate.Translator,
    state: State,
    pairs_of_split: dict[str, wmt.TranslationPairs],
    config: Config,
    mesh: Mesh,
) -> dict[str, float]:
    """Returns BLEU, label-smoothed loss, and perplexity (without smoothing) of each split; those of
    the test split as test_….

    Args:
        eval_fn: the compiled eval_step.
        pairs_of_split: one split or more of `Data.eval`.
    """
    metrics = {}
    state.model.eval()
    for split, pairs in pairs_of_split.items():
        plan = eval_plan(pairs, config, mesh)
        loader = loading.parallel_loader(pairs, plan, mesh, train=False, workers=config.workers)
        with loader:
            sums = [eval_fn(state, batch, config, mesh) for batch in loader]
            totals = device.fetch_sums(sums)
        loss = totals["loss"] / totals["tokens"]
        nll = totals["nll"] / totals["tokens"]

        bleu = translate.Bleu(pairs, config.bleu_tokenizer)
        translations = translator(pairs, bleu.unknown_word)
        values = {
            "bleu": bleu(translations, mesh),
            "loss": loss,
            "ppl": math.exp(min(nll, LARGEST_EXPONENT)),
        }
        prefix = "" if split == "valid" else f"{split}_"
        for name, value in values.items():
            metrics[prefix + name] = value
    state.model.train()
    return metrics


def average_checkpoints(
    checkpoints: checkpoint.Checkpointer,
    model: nn.Module,
    mesh: Mesh,
) -> list[int]:
    """Gives a model on the device the mean weights of checkpoints (Vaswani et al. 2017, section
    6.1).

    Averages `checkpoints.keep` of them: the last one, and the newest of those whose steps are
    multiples of `checkpoints.every`.

    Returns:
        The steps of the checkpoints.
    Raises:
        InputError: one of them is damaged, or the hosts of a pod see different ones.
    """
    device.wait_for_hosts(mesh)  # the main process has now written the last one
    known = checkpoints.complete_steps()
    last = known[-1]
    candidates = [step for step in known if step % checkpoints.every == 0 or step == last]
    steps = candidates[-checkpoints.keep :]
    device.same_on_all_hosts(
        mesh, "the checkpoints to average (the sum of their steps)", sum(steps)
    )

    sums: dict[str, Tensor] = {}
    for step in steps:
        saved = checkpoints.read(step)
        if saved is None:
            raise InputError(
                f"the checkpoint of step {step} in {checkpoints.path}, one of those to average, "
                "is damaged; remove it and those of later steps: "
                "the same command then trains again from what is left"
            )
        for name, _ in model.named_parameters():
            weight = saved[f"model.{name}"].double()
            if name in sums:
                sums[name] = sums[name] + weight
            else:
                sums[name] = weight

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(sums[name] / len(steps))
            # On XLA what was copied is a new value, without the parameter's placement.
            if parameter.device.type != "cpu":
                device.annotate_placement(parameter, mesh)
    return steps


def export(folder: str, state: State, data: Data, config: Config, mesh: Mesh, updates: int) -> None:
    """Writes model.pt, which fairseq and `make translate` load, with dictionaries and tokenizer
    beside it."""
    # All hosts call it; the main one gets the weights.
    weights = checkpoint.to_host(
        state.model.state_dict(), layers=mesh.layers, is_needed=mesh.main_process
    )
    if not mesh.main_process:
        return

    # make translate computes as the evaluation does, and joins pieces in the same way.
    settings = {
        "source_lang": data.train.source_language,
        "target_lang": data.train.target_language,
        "precision": config.precision,
    }
    if config.pieces:
        settings["pieces"] = config.pieces
    model = fairseq.write_checkpoint(state.model, weights, updates, **settings)
    files.write_file(f"{folder}/model.pt", model)

    signatures = {}
    for split, pairs in data.eval.items():
        signatures[split] = translate.Bleu(pairs, config.bleu_tokenizer).signature
    described = json.dumps({"signatures": signatures}, indent=1)
    files.write_file(f"{folder}/bleu.json", described.encode())

    for name, text in data.train.vocabulary_files().items():
        files.write_file(f"{folder}/{name}", text)


def open_evaluation(config: Config) -> Data:
    """Opens the pairs of --split, or of those that a training evaluates.

    Args:
        config: with the run's export as its weights.
    Raises:
        InputError: there are none; or they are of other languages or words than the export.
    """
    split = splits.wanted(config.split)
    if config.data == "synthetic":
        evaluated = {split or "valid": wmt.SyntheticPairs(split or "valid", seed=config.seed)}
    elif split:
        evaluated = {split: wmt.open_pairs(config.data, split, config.pieces)}
    else:
        evaluated = _open_evaluated(config)

    # Nothing is trained: `compare_dictionaries` and `make_model` take the dictionaries of `train`.
    data = Data(train=next(iter(evaluated.values())), eval=evaluated)
    not_found = compare_dictionaries(config, data)
    if not_found:
        raise InputError(
            f"{config.evaluate} has no {' nor '.join(not_found)} in its export, which "
            f"{config.data} has: it translates other languages"
        )
    return data


def evaluate_run(config: Config, mesh: Mesh) -> dict[str, float]:
    """Evaluates the run --evaluate by its export; returns the metrics, as `main` does."""
    run = FinishedRun(config.evaluate)
    # The export as --weights. `record` gets the config without them: it writes what the flags have
    # changed.
    exported = replace(config, weights=f"{run.path}/export/model.pt")
    data = open_evaluation(exported)
    check_evaluation(data, config, mesh)
    examples = sum(map(len, data.eval.values()))
    run.announce(mesh, config.data, f"{examples:,} pairs", *data.eval.values())

    state = State(make_model(exported, data, mesh), optimizer=None)
    eval_fn = device.compiled(eval_step, mesh, max_graphs=translate.MAX_SHAPES)
    translator = translate.Translator(state.model, mesh, config)
    metrics = evaluate(eval_fn, translator, state, data.eval, config, mesh)
    return run.record(config, mesh, examples, metrics)


def headline(
    config: Config,
    data: Data,
    plan: batching.Plan,
    batches_per_epoch: int,
    tokens_per_update: int,
) -> str:
    """Returns what a run says first.

    Args:
        tokens_per_update: target tokens, without padding.
    """
    shapes = ", ".join("x".join(map(str, shape)) for shape in plan.shapes)
    epochs = config.updates * config.update_every / batches_per_epoch
    sources = splits.said(data.train, *data.eval.values())
    return (
        f"{config.arch} on {config.data}: "
        f"{len(data.train):,} pairs, {plan.dropped:,} too long, "
        f"in batches of {shapes} with {plan.padding:.1%} padding, "
        f"{config.updates:,} updates of {tokens_per_update:,} target tokens "
        f"({epochs:.1f} epochs){sources}"
    )


def main(config: Config) -> dict[str, float]:
    """Trains, averages the last checkpoints or takes the best one, evaluates, exports; or evaluates
    a finished run. Returns bleu, loss and ppl, and test_bleu, …."""
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
    data = open_data(config)
    plan = translate.training_plan(data.train, config, mesh.num_devices)
    total_steps = config.updates
    batches_per_epoch = loading.steps_per_epoch(data.train, plan, mesh)
    target_tokens = int(data.train.lengths[:, 1].sum())  # of an epoch, without padding
    tokens_per_update = config.update_every * target_tokens // batches_per_epoch
    check_evaluation(data, config, mesh)

    # ---- the run's folder ------------------------------------------------------------------------
    languages = data.train.source_language + data.train.target_language
    kind = "synthetic" if config.data == "synthetic" else languages
    run = Run(
        config,
        mesh,
        name=f"transformer-{kind}",
        headline=headline(config, data, plan, batches_per_epoch, tokens_per_update),
        may_differ=MAY_CHANGE,
        sources=splits.sources_of(data.train, *data.eval.values()),
        total_steps=total_steps,
        unit="tokens",
        metrics=METRICS,
    )
    if run.finished:
        return run.print_summary()

    # ---- the model and its steps -----------------------------------------------------------------
    state = build(config, data, mesh)
    start = run.resume(
        state.model,
        state.optimizer,
        examples=len(data.train),
        keep=config.keep,
        every=config.save_every,
    )
    max_graphs = len(plan.shapes)
    if config.update_every > 1:
        train_fn = accumulate.AccumulatedStep(
            forward, update, state, ("loss", "nll"), mesh, per="tokens", max_graphs=max_graphs
        )
    else:
        train_fn = accumulate.SeededStep(train_step, mesh, max_graphs=max_graphs)
    eval_fn = device.compiled(eval_step, mesh, max_graphs=translate.MAX_SHAPES)
    translator = translate.Translator(state.model, mesh, config)
    state.model.train()

    def evaluation(step: int) -> None:
        """Evaluates the state after `step` on the validation split, and records it."""
        valid = {"valid": data.eval["valid"]}
        with run.pause():
            metrics = evaluate(eval_fn, translator, state, valid, config, mesh)
        run.evaluation(step, **metrics)

    # ---- the loop --------------------------------------------------------------------------------
    # A batch of the plan is a micro-batch here: an update has --update-every whole ones, so start
    # and stop count micro-batches.
    loader = loading.parallel_loader(
        data.train,
        plan,
        mesh,
        train=True,
        seed=config.seed,
        start=start * config.update_every,
        stop=total_steps * config.update_every,
        update_every=config.update_every,  # yields those of an update together
        workers=config.workers,
    )
    # All hosts of a pod agree on a stop signal, about every ten micro-batches.
    stop_every = max(10 // config.update_every, 1)  # in updates
    with run.training(loader, stop_every=stop_every):
        if run.evaluation_due:  # the run ended between a checkpoint and its evaluation
            evaluation(start)

        for step, micro_batches in enumerate(run.batches(loader), start + 1):
            lr = learning_rate(config, step - 1)
            device.set_lr(state.optimizer, lr)
            step_metrics = train_fn(state, micro_batches, config, mesh)

            if step == 1 or step % config.log_every == 0 or step == total_steps:
                run.log(
                    step,
                    examples=step * tokens_per_update,  # in the run's unit, tokens
                    input_wait=loader.input_wait(),
                    lr=lr,
                    **step_metrics,
                )
            evaluates = step % config.eval_every == 0 or step == total_steps
            run.checkpoint(step, due=step % config.save_every == 0, evaluates=evaluates)
            if evaluates:
                evaluation(step)

        # ---- the end -----------------------------------------------------------------------------
        run.checkpoints.wait()
        if config.best:
            run.load_best()  # one checkpoint: a mean with others would not be the best one
        else:
            averaged = average_checkpoints(run.checkpoints, state.model, mesh)
            run.message(f"the mean of the checkpoints of updates {averaged}:")
        metrics = evaluate(eval_fn, translator, state, data.eval, config, mesh)
        export(f"{run.path}/export", state, data, config, mesh, updates=run.saved_step)
        run.finish(metrics)
    return metrics


PRESETS = {
    "base": ("the paper's base model; needs --data and accelerators", Config()),
    "big": ("the big model with fairseq's large batches (WMT'16)", BIG),
    "wmt18": ("the big model on WMT'18", WMT18),
    "tpu": (
        "the base model with the shapes of Google's tutorial: 2,048x64 and 4,096x32 on eight cores",
        TPU,
    ),
    "tiny": ("a small network on a synthetic language: a minute on a CPU", TINY),
}

if __name__ == "__main__":
    cli.run(main, PRESETS)
