"""The Transformer on WMT English-German: from text to BLEU, with fairseq's numbers.

paper     Vaswani et al. 2017, Attention is all you need (arXiv:1706.03762); Ott et al. 2018 (arXiv:1806.00187)
recipes   base    Vaswani et al., tables 2 and 3: 25,000 source and target tokens a batch, 100,000 updates
          big     fairseq examples/scaling_nmt (WMT'16): 459,000 tokens a batch, learning rate 1e-3: 28.6 sacreBLEU on
                  newstest2014 (Ott et al.)
          wmt18   fairseq examples/backtranslation: the same for 30,000 updates on WMT'18: 29.0 sacreBLEU on
                  newstest2017 without back-translation
          tpu     base with the two shapes of Google's TPU tutorial for fairseq, 64 and 32 tokens on eight cores
data      a folder that `make data DATASET=wmt18 DATA=…` makes from text, or fairseq-preprocess
run       python -m train.transformer tiny                        a minute on two CPU cores, a synthetic language
          python -m train.transformer base --data /data/wmt18     on a TPU VM
result    the published recipes: not run yet; tiny and small real data: README
"""

import math
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from data import batching, wmt
from errors import InputError
from models import fairseq
from models.transformer import ARCHITECTURES, Transformer, label_smoothed
from train import translate
from train.common import averaging, checkpoint, cli, device, files, loading
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    data: str = ""  # folder that `make data` or fairseq-preprocess made, or "synthetic"
    arch: Literal[tuple(ARCHITECTURES)] = "transformer_wmt_en_de"  # sizes by fairseq's name
    share_embeddings: Literal["all", "decoder", "none"] = "all"  # all: one joint dictionary; decoder: in- and output
    dropout: float = 0.1  # of embeddings and of each sub-layer's output
    weights: str = ""  # checkpoint of fairseq or of an export to start from; it must fit arch and dictionaries
    lengths: tuple[int, ...] = ()  # tokens of a sentence: a compiled shape each; (): from the data, up to 256
    batch_tokens: int = 26_624  # places a batch on either side: sentences of length L come batch_tokens / L together
    pack: bool = True  # several sentence pairs in a row of the longest of `lengths`, instead of a shape a length
    update_every: int = 1  # batches whose gradients make an update
    updates: int = 100_000  # updates of the weights
    lr: float = 7e-4  # peak learning rate
    warmup_updates: int = 4000  # linear; then with the inverse square root of the update
    label_smoothing: float = 0.1  # of the training loss
    beam: int = 4  # hypotheses a sentence in evaluation
    length_penalty: float = 0.6  # exponent of a hypothesis' length, by which its log-probability is divided
    precision: Literal["bfloat16", "float32"] = "bfloat16"  # of forward and backward pass; parameters are float32
    seed: int = 0  # of the initial weights, the order of the data and dropout
    workers: int = 1  # processes a host that make batches; -1: one a core, 0: none
    log_every: int = 100  # updates between lines of metrics
    eval_every: int = 5000  # updates between evaluations
    save_every: int = 1500  # updates between checkpoints; there is one at each evaluation, too
    keep: int = 5  # checkpoints of save_every that stay; the mean of their weights is what is exported
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run


BIG = Config(
    arch="transformer_vaswani_wmt_en_de_big", dropout=0.3, batch_tokens=65_536, update_every=8, updates=40_000, lr=1e-3
)
WMT18 = replace(BIG, updates=30_000, beam=5, length_penalty=1.0)
TPU = Config(lengths=(32, 64), batch_tokens=131_072, pack=False, lr=5e-4)
TINY = Config(
    data="synthetic",
    arch="transformer_tiny",
    dropout=0.0,
    lengths=(8, 16),
    batch_tokens=1024,
    pack=False,
    updates=700,
    lr=4e-3,
    warmup_updates=100,
    beam=2,
    precision="float32",
    workers=0,
    log_every=20,
    eval_every=350,
    save_every=50,
    keep=2,
)

# What a run may change when it is resumed: none of these touches a number.
FREE = ("workers", "log_every", "strict")
ADAM = {"betas": (0.9, 0.98), "eps": 1e-8}  # of fairseq's recipes
WARMUP_INIT_LR = 1e-7  # fairseq's
AUTO_SHAPES, AUTO_LONGEST = 4, 256


def learning_rate(config: Config, step: int) -> float:
    """Of update 0, 1, …: fairseq's inverse_sqrt."""
    if step < config.warmup_updates:
        return WARMUP_INIT_LR + (config.lr - WARMUP_INIT_LR) * step / config.warmup_updates
    return config.lr * math.sqrt(config.warmup_updates / step)


def validate(config: Config) -> None:
    """Refuses values outside their range before anything is made."""
    at_least = {1: "batch_tokens update_every updates warmup_updates beam log_every eval_every save_every keep"}
    at_least |= {0: "lr seed length_penalty", -1: "workers"}
    for low, fields in at_least.items():
        for field in fields.split():
            if not getattr(config, field) >= low:
                raise InputError(f"--{field.replace('_', '-')} is {getattr(config, field)}; it must be at least {low}")
    for field in ("dropout", "label_smoothing"):
        if not 0 <= getattr(config, field) < 1:
            raise InputError(f"--{field.replace('_', '-')} is {getattr(config, field)}; it must be 0 or more, below 1")
    positions = ARCHITECTURES[config.arch].max_positions
    if list(config.lengths) != sorted(set(config.lengths)) or not all(2 <= n <= positions for n in config.lengths):
        raise InputError(f"--lengths are {config.lengths}; they must rise and be between 2 and {positions}")


def open_data(config: Config):
    """(training pairs, {"valid": pairs, and "test" if there is such a split}), see data/wmt.py."""
    if not config.data:
        raise InputError("--data is missing: give a folder that `make data` made; `--data synthetic` is a trial")
    if config.data == "synthetic":
        return wmt.SyntheticPairs("train", seed=config.seed), {"valid": wmt.SyntheticPairs("valid", seed=config.seed)}
    splits = ["valid", "test"] if wmt.has_split(config.data, "test") else ["valid"]
    return wmt.open_pairs(config.data, "train"), {split: wmt.open_pairs(config.data, split) for split in splits}


def training_plan(config: Config, pairs, devices: int = 1) -> batching.Buckets | batching.Packed:
    """Which pairs share a batch, and the batches' shapes."""
    lengths = config.lengths
    if not lengths:
        usual = pairs.lengths[pairs.lengths.max(1) <= AUTO_LONGEST]
        if not len(usual):
            raise InputError(f"{config.data} has no pair of at most {AUTO_LONGEST} tokens a side; give --lengths")
        lengths = [length for _, length, _ in batching.propose_shapes(usual, 2**30, AUTO_SHAPES)]
    shapes = [(translate.rows(config.batch_tokens, length, devices), length, length) for length in lengths]
    if config.pack:
        return batching.pack(pairs.lengths, shapes[-1], config.seed)
    return batching.Buckets(pairs.lengths, shapes)


def build(config: Config, pairs, mesh: device.Mesh) -> tuple[Transformer, torch.optim.Optimizer]:
    """Model and optimizer on the device, with the optimizer's state in being."""
    arch = replace(ARCHITECTURES[config.arch], dropout=config.dropout, share_embeddings=config.share_embeddings)
    words = len(pairs.source_dictionary), len(pairs.target_dictionary)
    if config.share_embeddings == "all" and pairs.source_dictionary is not pairs.target_dictionary:
        raise InputError(f"{config.data} has two dictionaries; use --share-embeddings decoder, or a joint dictionary")
    model = Transformer(arch, *words)
    if config.weights:
        _, weights = fairseq.read_checkpoint(files.read_file(config.weights), config.weights)
        fairseq.load_weights(model, weights, config.weights)
    device.to_device(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), config.lr, foreach=False, **ADAM)
    device.init_optimizer_state(optimizer, mesh)
    return model, optimizer


def forward(model: Transformer, batch: dict[str, Tensor], smoothing: float, mesh) -> dict[str, Tensor]:
    """`label_smoothed` of a batch: "source" [B, S], "previous" and "target" [B, T], and segments where it is packed."""
    with mesh.autocast():
        segments = batch.get("source_segment"), batch.get("target_segment")
        logits = model(batch["source"], batch["previous"], *segments)
    return label_smoothed(logits, batch["target"], smoothing)


def train_step(model, optimizer, batch: dict[str, Tensor], config: Config, mesh) -> dict[str, Tensor]:
    """One update from one batch; returns the mean loss and nll of its tokens."""
    sums = forward(model, batch, config.label_smoothing, mesh)
    means = {name: sums[name] / sums["tokens"] for name in ("loss", "nll")}
    means["loss"].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {name: mean.detach() for name, mean in means.items()}


def gradient_step(model, batch: dict[str, Tensor], totals: dict[str, Tensor], config: Config, mesh) -> None:
    """Adds a batch's gradients to the parameters' `grad`, and its sums to `totals`: both stay on the device."""
    sums = forward(model, batch, config.label_smoothing, mesh)
    sums["loss"].backward()
    for name, total in totals.items():
        total.add_(sums[name].detach())


def update_step(model, optimizer, totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """One update from the gradients of several batches, each token of which counts the same."""
    for parameter in model.parameters():
        parameter.grad.div_(totals["tokens"])
    optimizer.step()
    means = {name: totals[name] / totals["tokens"] for name in ("loss", "nll")}
    for tensor in [*totals.values(), *(parameter.grad for parameter in model.parameters())]:
        tensor.zero_()
    return means


def eval_step(model, batch: dict[str, Tensor], config: Config, mesh) -> dict[str, Tensor]:
    """Sums over the tokens of a batch; padding does not count."""
    with torch.no_grad():
        return forward(model, batch, config.label_smoothing, mesh)


def evaluate(step, translator, model, pairs, config: Config, mesh) -> dict[str, float]:
    """BLEU of the best hypotheses against the references, and loss and perplexity a token; `step` is the compiled
    eval_step. Prints the first translation, and BLEU with its signature."""
    from sacrebleu.metrics import BLEU

    model.eval()
    plan = translate.evaluation_plan(pairs.lengths, config.lengths, config.batch_tokens, model, mesh)
    with loading.parallel_loader(pairs, plan, mesh, train=False, workers=config.workers) as loader:
        sums = [step(model, batch, config, mesh) for batch in loader]
    names = list(sums[0])
    values = device.fetch([batch[name] for batch in sums for name in names])
    totals = {name: math.fsum(values[i :: len(names)]) for i, name in enumerate(names)}
    hypotheses, references = translator(pairs), pairs.references()
    model.train()
    bleu = BLEU(trg_lang=pairs.target_language)
    score = bleu.corpus_score(hypotheses, [references])
    if mesh.main_process:
        print(
            f"{pairs.split}: {score} {bleu.get_signature()}\n  {hypotheses[0]}\n  {references[0]} (reference)",
            flush=True,
        )
    nll = totals["nll"] / totals["tokens"]
    return {"bleu": score.score, "loss": totals["loss"] / totals["tokens"], "ppl": math.exp(min(nll, 700))}


def export(folder: str, model: Transformer, pairs, config: Config) -> None:
    """Writes model.pt, which fairseq and `make translate` load, with dictionaries and tokenizer beside it."""
    weights = checkpoint.to_host({name: value.detach() for name, value in model.state_dict().items()})
    languages = {"source_lang": pairs.source_language, "target_lang": pairs.target_language}
    content = fairseq.write_checkpoint(model, weights, config.updates, **languages)
    files.write_file(f"{folder}/model.pt", content)
    for name, text in pairs.vocabulary_files().items():
        files.write_file(f"{folder}/{name}", text)


def main(config: Config) -> dict[str, float]:
    """Trains, averages the last checkpoints, evaluates and exports; returns the final metrics: bleu, loss and ppl of
    the validation split, and those of the test split (test_bleu, …) where there is one."""
    validate(config)
    mesh = device.setup(config.seed, config.precision, config.strict)
    train_set, eval_sets = open_data(config)
    plan = training_plan(config, train_set, mesh.num_devices)
    total, every, per_epoch = config.updates, config.update_every, loading.steps_per_epoch(train_set, plan, mesh)
    tokens = every * int(train_set.lengths[:, 1].sum()) // per_epoch  # real target tokens an update
    trial = config.data == "synthetic"
    shapes = ", ".join("x".join(map(str, shape)) for shape in plan.shapes)
    headline = f"{config.arch} on {config.data}: {len(train_set):,} pairs, {plan.dropped:,} too long, in batches of "
    headline += f"{shapes} with {plan.padding:.1%} padding, {total:,} updates of {tokens:,} target tokens "
    headline += f"({total * every / per_epoch:.1f} epochs) on {mesh.num_devices} {mesh.kind} device(s)"
    run = Run(
        config,
        default_name=f"transformer-{'synthetic' if trial else train_set.source_language + train_set.target_language}",
        headline=headline + ("; this is a trial, for real training see --help" if trial else ""),
        devices={"kind": mesh.kind, "devices": mesh.num_devices, "hosts": mesh.process_count},
        main_process=mesh.main_process,
        free=FREE,
        total_steps=total,
        unit="tokens",
    )
    run.check_hosts(mesh)
    if run.finished:
        run.print_summary()
        return run.summary["metrics"]

    model, optimizer = build(config, train_set, mesh)
    path = f"{run.path}/checkpoints"
    checkpoints = checkpoint.Checkpointer(path, config.keep, mesh.main_process, every=config.save_every)
    start = checkpoints.restore(model, optimizer, mesh)
    device.same_on_all_hosts(mesh, "the update to resume from", start)
    device.same_on_all_hosts(mesh, "the number of training pairs", len(train_set))
    if run.resumed:
        run.resume_at(start)
    step_fn = device.compiled(train_step, mesh, len(plan.shapes))
    gradient_fn, update_fn = device.compiled(gradient_step, mesh, len(plan.shapes)), device.compiled(update_step, mesh)
    eval_fn = device.compiled(eval_step, mesh, translate.MAX_SHAPES)
    translator = translate.Translator(model, mesh, config)
    totals = device.gradient_buffers(model, ("loss", "nll", "tokens"), mesh) if every > 1 else {}
    model.train()
    span = {"seed": config.seed, "start": start * every, "stop": total * every}
    loader = loading.parallel_loader(train_set, plan, mesh, train=True, workers=config.workers, **span)
    with device.stop_requested(mesh, every=max(10 // every, 1)) as stopped, closing(run), checkpoints, loader:
        for number, batch in enumerate(loader, start * every + 1):
            device.seed_step(config.seed, number)
            step = -(-number // every)
            lr = learning_rate(config, step - 1)
            device.set_lr(optimizer, lr)
            if every == 1:
                step_metrics = step_fn(model, optimizer, batch, config, mesh)
            else:
                gradient_fn(model, batch, totals, config, mesh)
                if number % every:
                    continue
                step_metrics = update_fn(model, optimizer, totals)
            if step == 1 or step % config.log_every == 0 or step == total:
                run.log(step, examples=step * tokens, input_wait=loader.input_wait(), lr=lr, **step_metrics)
            stop = stopped() and step < total
            evaluates = step % config.eval_every == 0 or step == total
            if evaluates:
                with run.pause():
                    metrics = evaluate(eval_fn, translator, model, eval_sets["valid"], config, mesh)
                run.evaluation(step, **metrics)
            # After the evaluation, so that a run resumed from this checkpoint has its figures.
            if evaluates or stop or step % config.save_every == 0:
                with run.pause():
                    run.upload()  # so that what a resumed run keeps is there before its checkpoint is
                    checkpoints.save(step, model, optimizer)
            checkpoints.raise_failure()
            if stop:
                checkpoints.wait()
                run.message(f"stopped by a signal at update {step}: saved; the same command goes on from here")
                raise SystemExit(143)
        checkpoints.wait()
        device.same_on_all_hosts(mesh, "the last update", total)  # which the main process has now written
        run.message(f"the mean of the checkpoints of updates {averaging.average(checkpoints, model, mesh)}:")
        metrics = {}
        for split, pairs in eval_sets.items():
            of_split = evaluate(eval_fn, translator, model, pairs, config, mesh)
            metrics |= of_split if split == "valid" else {f"{split}_{name}": of_split[name] for name in of_split}
        if mesh.main_process:
            export(f"{run.path}/export", model, train_set, config)
        run.finish(metrics, device.graph_report())
    return metrics


PRESETS = {
    "base": ("the paper's base model; needs --data and accelerators", Config()),
    "big": ("the big model with fairseq's large batches (WMT'16)", BIG),
    "wmt18": ("the big model on WMT'18", WMT18),
    "tpu": ("the base model with the shapes of Google's tutorial: 2,048x64 and 4,096x32 on eight cores", TPU),
    "tiny": ("a small network on a synthetic language: a minute on a CPU", TINY),
}

if __name__ == "__main__":
    cli.run(main, PRESETS)
