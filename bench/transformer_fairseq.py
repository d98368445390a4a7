"""The Transformer on a folder: `train.transformer` against fairseq-train on this CPU, one recipe.

ours      python -m train.transformer base …, the command that is printed
fairseq   fairseq-train and fairseq-generate of `make fairseq`, which read the same folder
both      one core each, side by side; the same sizes, dictionary, number of updates, tokens per
          batch (fairseq's --max-tokens counts padding, as --batch-tokens does), Adam, inverse
          square root, label smoothing; float32. Initial weights, order of the data and dropout
          masks differ: compare means and spread, not seeds
measured  perplexity of the validation split every --eval-every updates, and sacreBLEU at the end:
          beam search with the same beam and length penalty, the same references, no averaging of
          checkpoints
run       make fairseq
          python -m bench.transformer_fairseq --data FOLDER --updates 800 --seeds 0,1,2
          --sides ours runs one side again, when only that has changed
          --keep FOLDER keeps fairseq's checkpoints, with dictionaries and tokenizer: for make
          translate MODEL_DIR=FOLDER/seed-0, and train.transformer --weights FOLDER/seed-0/model.pt
"""

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from data import wmt
from errors import InputError
from models.transformer import ARCHITECTURES
from train.transformer import ADAM, WARMUP_INIT_LR
from train.translate import MAX_LENGTH_A, MAX_LENGTH_B

# torch_xla's default on a CPU draws 20 times slower: a third of the training step was dropout.
FAST_RANDOM = "three_fry"
FAIRSEQ = Path(__file__).parent.parent / ".venv-fairseq/bin"
COLOURS = {"ours": "tab:blue", "fairseq": "tab:orange"}


@dataclass(frozen=True)
class Options:
    data: str  # folder that `make data DATASET=wmt18` or fairseq-preprocess made, joint dictionary
    arch: str = "transformer_small"  # sizes, see models/transformer.py
    updates: int = 800  # of the weights
    batch_tokens: int = 4096  # tokens per batch on either side, padding counted
    length: int = 64  # tokens of a row, in which our side packs pairs; longer sentences are dropped
    lr: float = 1e-3  # peak learning rate
    warmup_updates: int = 200  # linear; then with the inverse square root
    dropout: float = 0.1  # of embeddings and of each sub-layer's output
    beam: int = 4  # hypotheses per sentence
    length_penalty: float = 0.6  # exponent of a hypothesis' length
    eval_every: int = 100  # updates between evaluations
    seeds: str = "0,1,2"  # one run of each side for every seed
    sides: tuple[Literal["ours", "fairseq"], ...] = ("ours", "fairseq")  # which of them run
    out: str = "runs/bench/transformer_fairseq.json"  # where the figures go
    picture: str = ""  # PNG with the learning curves; "": none
    keep: str = ""  # folder that gets fairseq's last checkpoint of each seed; "": none stays


def flags_of(values: dict[str, Any]) -> list[str]:
    """Returns --name value for each value."""
    flags = []
    for name, value in values.items():
        flags += [f"--{name}", str(value)]
    return flags


def ours(options: Options, folder: str, seed: int) -> list[str]:
    """Returns the command of our side; the run is written to `folder`/ours."""
    values = {
        "data": options.data,
        "arch": options.arch,
        "dropout": options.dropout,
        "lengths": options.length,
        "batch-tokens": options.batch_tokens,
        "updates": options.updates,
        "lr": options.lr,
        "warmup-updates": options.warmup_updates,
        "beam": options.beam,
        "length-penalty": options.length_penalty,
        "precision": "float32",
        "seed": seed,
        "workers": 0,
        "log-every": options.eval_every,
        "eval-every": options.eval_every,
        "save-every": options.updates,
        "keep": 1,
        "runs": folder,
        "name": "ours",
    }
    command = [sys.executable, "-m", "train.transformer", "base", "--pack"]
    return command + flags_of(values)


def fairseq(options: Options, folder: str, seed: int, data: str) -> list[str]:
    """Returns the command of fairseq's training; checkpoints are written to `folder`."""
    arch = ARCHITECTURES[options.arch]
    if arch.pre_norm or arch.activation_dropout or arch.attention_dropout:
        raise InputError(
            f"--arch {options.arch} has switches that this comparison does not pass on to fairseq"
        )

    pairs = wmt.open_pairs(data, "train")
    values = {
        "source-lang": pairs.source_language,  # the checkpoint then names them, for make translate
        "target-lang": pairs.target_language,
        "arch": "transformer",
        "dropout": options.dropout,
        "criterion": "label_smoothed_cross_entropy",
    }
    for stack in ("encoder", "decoder"):
        values |= {
            f"{stack}-embed-dim": arch.dim,
            f"{stack}-ffn-embed-dim": arch.ffn_dim,
            f"{stack}-attention-heads": arch.heads,
            f"{stack}-layers": getattr(arch, f"{stack}_layers"),
        }
    values |= {
        "label-smoothing": 0.1,
        "optimizer": "adam",
        "adam-betas": str(ADAM["betas"]),
        "adam-eps": ADAM["eps"],
        "clip-norm": 0,
        "weight-decay": 0,
        "lr": options.lr,
        "lr-scheduler": "inverse_sqrt",
        "warmup-updates": options.warmup_updates,
        "warmup-init-lr": WARMUP_INIT_LR,
        "max-tokens": options.batch_tokens,
        "max-source-positions": options.length,
        "max-target-positions": options.length,
        "required-batch-size-multiple": 1,
        "max-update": options.updates,
        "validate-interval-updates": options.eval_every,
        "save-interval-updates": options.updates,
        "num-workers": 0,
        "seed": seed + 1,
        "log-format": "json",
        "log-interval": options.eval_every,
        "save-dir": folder,
    }
    switches = [
        "--share-all-embeddings",
        "--skip-invalid-size-inputs-valid-test",
        "--cpu",
        "--no-epoch-checkpoints",
    ]
    return [str(FAIRSEQ / "fairseq-train"), data, *switches, *flags_of(values)]


def start(command: list[str], log: Path, core: int) -> subprocess.Popen:
    """Starts a side on one core; its output goes to `log`."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CPU_NUM_DEVICES": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "XLA_RNG_BIT_GENERATOR": FAST_RANDOM,
    }
    with open(log, "w") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )


def succeeded(name: str, process: subprocess.Popen, log: Path) -> None:
    """Waits for a side. Raises InputError with the end of what it wrote, if it failed."""
    if process.wait() != 0:
        last_lines = log.read_text().splitlines()[-15:]
        raise InputError(f"{name} failed:\n" + "\n".join(last_lines))


def fairseq_bleu(options: Options, folder: str, data: str, core: int) -> float:
    """Returns sacreBLEU of fairseq-generate on the validation split.

    Its hypotheses are joined to words as ours are.
    """
    from sacrebleu.metrics import BLEU

    values = {
        "path": f"{folder}/checkpoint_last.pt",
        "gen-subset": "valid",
        "beam": options.beam,
        "lenpen": options.length_penalty,
        "max-len-a": MAX_LENGTH_A,
        "max-len-b": MAX_LENGTH_B,
        "max-tokens": options.batch_tokens,
        "required-batch-size-multiple": 1,
        "num-workers": 0,
    }
    command = [str(FAIRSEQ / "fairseq-generate"), data, "--cpu", "--remove-bpe", "sentencepiece"]
    command += flags_of(values)
    log = Path(folder, "generate.txt")
    succeeded("fairseq-generate", start(command, log, core), log)

    found = {}
    for number, text in re.findall(r"^H-(\d+)\t\S+\t(.*)$", log.read_text(), re.MULTILINE):
        found[int(number)] = text
    valid = wmt.open_pairs(options.data, "valid")
    if len(found) != len(valid):
        raise InputError(f"fairseq-generate translated {len(found)} of {len(valid)} sentences")
    hypotheses = [found[number] for number in range(len(valid))]
    bleu = BLEU(trg_lang=valid.target_language)
    return bleu.corpus_score(hypotheses, [valid.references()]).score


def result_of_ours(folder: str) -> dict:
    """Returns {"bleu", "ppl", "curve": [[updates, perplexity]]} of a run in `folder`/ours."""
    metrics = json.loads(Path(folder, "ours/summary.json").read_text())["metrics"]
    curve = []
    for text_line in Path(folder, "ours/metrics.jsonl").read_text().splitlines():
        line = json.loads(text_line)
        if "eval/ppl" in line:
            curve.append([line["step"], line["eval/ppl"]])
    return {"bleu": metrics["bleu"], "ppl": metrics["ppl"], "curve": curve}


def fairseq_curve(log: Path) -> list[list]:
    """Returns [[updates, perplexity]] of fairseq's evaluations."""
    perplexity = {}
    for found in re.findall(r"(\{.*\"valid_ppl\".*\})", log.read_text()):
        record = json.loads(found)
        perplexity[int(record["valid_num_updates"])] = float(record["valid_ppl"])
    return [list(point) for point in sorted(perplexity.items())]


def run(options: Options, seed: int, data: str) -> dict[str, dict]:
    """Runs the sides with one seed, each on a core of its own.

    Returns:
        By side {"bleu", "ppl", "curve": [[updates, perplexity]]}.
    """
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        commands = {}
        if "ours" in options.sides:
            commands["ours"] = ours(options, folder, seed)
        if "fairseq" in options.sides:
            commands["fairseq"] = fairseq(options, f"{folder}/fairseq", seed, data)
            os.makedirs(f"{folder}/fairseq")
        logs = {name: Path(folder, f"{name}.log") for name in commands}

        processes = {}
        for number, (name, command) in enumerate(commands.items()):
            print(shlex.join(command), flush=True)
            processes[name] = start(command, logs[name], cores[number % len(cores)])
        try:
            for name, process in processes.items():
                succeeded(name, process, logs[name])
        finally:
            for process in processes.values():
                process.kill()

        result = {}
        if "ours" in commands:
            result["ours"] = result_of_ours(folder)
        if "fairseq" in commands:
            if options.keep:
                keep_checkpoint(Path(folder, "fairseq/checkpoint_last.pt"), options, seed)
            curve = fairseq_curve(logs["fairseq"])
            bleu = fairseq_bleu(options, f"{folder}/fairseq", data, cores[0])
            _, last_perplexity = curve[-1]
            result["fairseq"] = {"bleu": bleu, "ppl": last_perplexity, "curve": curve}
    return result


def keep_checkpoint(checkpoint: Path, options: Options, seed: int) -> None:
    """Copies fairseq's checkpoint into a folder of its own in --keep, with the dictionaries and the
    tokenizer of the data."""
    folder = Path(options.keep, f"seed-{seed}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in wmt.open_pairs(options.data, "train").vocabulary_files().items():
        (folder / name).write_bytes(content)
    shutil.copyfile(checkpoint, folder / "model.pt")
    print(f"{folder} has fairseq's checkpoint", flush=True)


def draw(results: dict[str, list[dict]], path: str) -> None:
    """Draws the perplexity of the validation split against updates, one line per seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="update", ylabel="validation perplexity", yscale="log")
    for name, runs in results.items():
        for number, result in enumerate(runs):
            updates, perplexities = zip(*result["curve"], strict=True)
            label = name if number == 0 else None  # one entry per side in the legend
            axes.plot(updates, perplexities, color=COLOURS[name], alpha=0.8, label=label)
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(path)


def row(name: str, runs: list[dict]) -> str:
    """Returns a side's row of the table."""
    bleu = [result["bleu"] for result in runs]
    spread = statistics.stdev(bleu) if len(bleu) > 1 else float("nan")
    each = ", ".join(f"{value:.1f}" for value in bleu)
    perplexity = statistics.fmean(result["ppl"] for result in runs)
    return f"| {name} | {statistics.fmean(bleu):.1f} ± {spread:.1f} ({each}) | {perplexity:.2f} |"


def main(options: Options) -> None:
    """Runs the sides for every seed, prints a table and writes the figures."""
    if "fairseq" in options.sides and not (FAIRSEQ / "fairseq-train").exists():
        raise InputError("fairseq is not installed; `make fairseq` makes its environment")
    if options.keep and "fairseq" not in options.sides:
        raise InputError(
            f"--keep is {options.keep}, for fairseq's checkpoints, and --sides has no fairseq; "
            "leave one out"
        )

    data = str(wmt.open_pairs(options.data, "train").folder)
    results: dict[str, list[dict]] = {name: [] for name in options.sides}
    for seed in map(int, options.seeds.split(",")):
        for name, result in run(options, seed, data).items():
            results[name].append(result)
            figures = f"BLEU {result['bleu']:.2f}, perplexity {result['ppl']:.2f}"
            print(f"seed {seed} {name}: {figures}", flush=True)
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        record = {"options": vars(options), "results": results}
        Path(options.out).write_text(json.dumps(record, indent=1))

    print("\n| | BLEU, mean ± sd (each seed) | perplexity |\n|---|---|---|")
    for name, runs in results.items():
        print(row(name, runs))
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__.split("\n")[0]))
    except InputError as error:
        sys.exit(f"error: {error}")
