"""The Transformer on a prepared folder: `train.transformer` against fairseq-train on this CPU, by the same recipe.

ours      python -m train.transformer base …, the command that is printed
fairseq   fairseq-train and fairseq-generate of `make fairseq`, which read the same folder
both      one core each, side by side; the same sizes, dictionary, number of updates, tokens a batch (fairseq's
          --max-tokens counts places, as --batch-tokens does), Adam, inverse square root, label smoothing; float32.
          Initial weights, order of the data and dropout masks differ: compare means and spread, not seeds
measured  perplexity of the validation split every --eval-every updates, and sacreBLEU at the end: beam search with
          the same beam and length penalty, the same references, no averaging of checkpoints
run       make fairseq
          python -m bench.transformer_fairseq --data FOLDER --updates 800 --seeds 0,1,2
          --sides ours runs one side again, when only that has changed
"""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from data import wmt
from errors import InputError
from models.transformer import ARCHITECTURES
from train.transformer import ADAM, WARMUP_INIT_LR
from train.translate import MAX_LENGTH_A, MAX_LENGTH_B

# What torch_xla takes by default on a CPU draws 20 times slower: a third of the training step was dropout.
FAST_RANDOM = "three_fry"
FAIRSEQ = Path(__file__).parent.parent / ".venv-fairseq/bin"
COLOURS = {"ours": "tab:blue", "fairseq": "tab:orange"}


@dataclass(frozen=True)
class Options:
    data: str  # folder that `make data DATASET=wmt18` or fairseq-preprocess made, with a joint dictionary
    arch: str = "transformer_small"  # sizes, see models/transformer.py
    updates: int = 800  # of the weights
    batch_tokens: int = 4096  # places a batch on either side
    length: int = 64  # places of a row, into which our side packs sentence pairs; longer sentences are left out
    lr: float = 1e-3  # peak learning rate
    warmup_updates: int = 200  # linear; then with the inverse square root
    dropout: float = 0.1  # of embeddings and of each sub-layer's output
    beam: int = 4  # hypotheses a sentence
    length_penalty: float = 0.6  # exponent of a hypothesis' length
    eval_every: int = 100  # updates between evaluations
    seeds: str = "0,1,2"  # one run of each side for every seed
    sides: tuple[Literal["ours", "fairseq"], ...] = ("ours", "fairseq")  # which of them run
    out: str = "runs/bench/transformer_fairseq.json"  # where the figures go
    picture: str = ""  # PNG with the learning curves; "": none


def ours(options: Options, folder: str, seed: int) -> list[str]:
    """Command of our side."""
    flags = {
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
    return command + [str(part) for flag, value in flags.items() for part in (f"--{flag}", value)]


def fairseq(options: Options, folder: str, seed: int, data: str) -> list[str]:
    """Command of fairseq's training."""
    arch = ARCHITECTURES[options.arch]
    if arch.pre_norm or arch.activation_dropout or arch.attention_dropout:
        raise InputError(
            f"--arch {options.arch} has switches that this comparison does not pass on to fairseq"
        )
    flags = {
        "arch": "transformer",
        "dropout": options.dropout,
        "criterion": "label_smoothed_cross_entropy",
    }
    for stack in ("encoder", "decoder"):
        flags |= {f"{stack}-embed-dim": arch.dim, f"{stack}-ffn-embed-dim": arch.ffn_dim}
        flags |= {
            f"{stack}-attention-heads": arch.heads,
            f"{stack}-layers": getattr(arch, f"{stack}_layers"),
        }
    flags |= {
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
    command = [str(FAIRSEQ / "fairseq-train"), data, *switches]
    return command + [str(part) for flag, value in flags.items() for part in (f"--{flag}", value)]


def start(command: list[str], log: Path, core: int) -> subprocess.Popen:
    """Starts a side on one core; its output goes to `log`."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CPU_NUM_DEVICES": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    }
    environment["XLA_RNG_BIT_GENERATOR"] = FAST_RANDOM
    with open(log, "w") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )


def succeeded(name: str, process: subprocess.Popen, log: Path) -> None:
    """Waits for a side. Raises InputError with the end of what it wrote."""
    if process.wait() != 0:
        raise InputError(f"{name} failed:\n" + "\n".join(log.read_text().splitlines()[-15:]))


def fairseq_bleu(options: Options, folder: str, data: str, core: int) -> float:
    """sacreBLEU of fairseq-generate on the validation split, its hypotheses joined as ours are."""
    from sacrebleu.metrics import BLEU

    flags = {"path": f"{folder}/checkpoint_last.pt", "gen-subset": "valid", "beam": options.beam}
    flags |= {
        "lenpen": options.length_penalty,
        "max-len-a": MAX_LENGTH_A,
        "max-len-b": MAX_LENGTH_B,
    }
    flags |= {
        "max-tokens": options.batch_tokens,
        "required-batch-size-multiple": 1,
        "num-workers": 0,
    }
    command = [str(FAIRSEQ / "fairseq-generate"), data, "--cpu", "--remove-bpe", "sentencepiece"]
    command += [str(part) for flag, value in flags.items() for part in (f"--{flag}", value)]
    log = Path(folder, "generate.txt")
    succeeded("fairseq-generate", start(command, log, core), log)
    found = {
        int(n): text
        for n, text in re.findall(r"^H-(\d+)\t\S+\t(.*)$", log.read_text(), re.MULTILINE)
    }
    valid = wmt.open_pairs(options.data, "valid")
    if len(found) != len(valid):
        raise InputError(f"fairseq-generate translated {len(found)} of {len(valid)} sentences")
    hypotheses = [found[number] for number in range(len(valid))]
    return BLEU(trg_lang=valid.target_language).corpus_score(hypotheses, [valid.references()]).score


def run(options: Options, seed: int, data: str) -> dict[str, dict]:
    """The sides with one seed, each on a core of its own: {"ours" and "fairseq": {"bleu", "ppl", "curve"}}."""
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
            summary = json.loads(Path(folder, "ours/summary.json").read_text())
            lines = [
                json.loads(line)
                for line in Path(folder, "ours/metrics.jsonl").read_text().splitlines()
            ]
            curve = [[line["step"], line["eval/ppl"]] for line in lines if "eval/ppl" in line]
            result["ours"] = {
                "bleu": summary["metrics"]["bleu"],
                "ppl": summary["metrics"]["ppl"],
                "curve": curve,
            }
        if "fairseq" in commands:
            text = logs["fairseq"].read_text()
            records = [json.loads(found) for found in re.findall(r"(\{.*\"valid_ppl\".*\})", text)]
            curve = sorted(
                {
                    int(record["valid_num_updates"]): float(record["valid_ppl"])
                    for record in records
                }.items()
            )
            bleu = fairseq_bleu(options, f"{folder}/fairseq", data, cores[0])
            result["fairseq"] = {
                "bleu": bleu,
                "ppl": curve[-1][1],
                "curve": [list(point) for point in curve],
            }
    return result


def draw(results: dict[str, list[dict]], path: str) -> None:
    """Perplexity of the validation split against updates, a line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="update", ylabel="validation perplexity", yscale="log")
    for name, runs in results.items():
        for number, one in enumerate(runs):
            axes.plot(
                *zip(*one["curve"], strict=True),
                color=COLOURS[name],
                alpha=0.8,
                label=None if number else name,
            )
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(path)


def main(options: Options) -> None:
    """Runs the sides for every seed, prints a table and writes the figures."""
    if "fairseq" in options.sides and not (FAIRSEQ / "fairseq-train").exists():
        raise InputError("fairseq is not installed; `make fairseq` makes its environment")
    data = str(wmt.open_pairs(options.data, "train").folder)
    results: dict[str, list[dict]] = {name: [] for name in options.sides}
    for seed in map(int, options.seeds.split(",")):
        for name, result in run(options, seed, data).items():
            results[name].append(result)
            print(
                f"seed {seed} {name}: BLEU {result['bleu']:.2f}, perplexity {result['ppl']:.2f}",
                flush=True,
            )
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(
            json.dumps({"options": vars(options), "results": results}, indent=1)
        )
    print("\n| | BLEU, mean ± sd (each seed) | perplexity |\n|---|---|---|")
    for name, runs in results.items():
        bleu = [one["bleu"] for one in runs]
        spread = statistics.stdev(bleu) if len(bleu) > 1 else float("nan")
        each = ", ".join(f"{value:.1f}" for value in bleu)
        perplexity = statistics.fmean(one["ppl"] for one in runs)
        print(
            f"| {name} | {statistics.fmean(bleu):.1f} ± {spread:.1f} ({each}) | {perplexity:.2f} |"
        )
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__.split("\n")[0]))
    except InputError as error:
        sys.exit(f"error: {error}")
