"""Records what fairseq computes, as golden files that the ordinary tests compare with.

    make fairseq-golden
    .venv-fairseq/bin/python tests/fairseq_reference/record.py [--out FOLDER] [--trained FOLDER]

Runs in the environment of `make fairseq`, on the CPU with one thread, about a minute. On one
machine the numbers are the same each time; on another, rounding makes trained models differ:
--trained takes the trained checkpoints of another recording and computes all else anew, and those
numbers agree to rounding on any machine.

FOLDER (default: golden, beside this file) then holds:
    text/                 input: 200 + 20 + 12 sentence pairs, {train,valid,test}.{en,de}, of a toy
                          language: word by word, but the adverb comes first and the verb last; an
                          unknown word ends valid.en and test.en
    joint/                fairseq-preprocess' output with --joined-dictionary: dict.en.txt,
                          dict.de.txt, *.bin, *.idx
    separate/, roberta/   the dictionaries of prenorm.pt and of roberta.pt (its <mask> comes after
                          the file's symbols)
    initial.pt            arch `transformer`, tiny, all embeddings shared, dropout 0; untrained
    trained.pt            the same after 400 updates of fairseq-train with dropout 0.1
    prenorm.pt            pre-norm, three unshared embedding tables, 30 updates
    roberta.pt            RoBERTa of 2 layers, 30 updates
    roberta_bpe/          input: encoder.json, vocab.bpe and dict.txt in the form of the released
                          models: GPT-2's bytes, 60 merges learnt from train.en, a dictionary filled
                          up to a multiple of 8
    roberta_bpe.pt, .npz  RoBERTa of 2 layers for these, see roberta_bpe()
    arrays.npz            batches and logits; see the functions below for names and shapes
    numbers.json          losses of ten steps from initial.pt, beam search with trained.pt
Checkpoints are fairseq's own, less the optimizer's state and the timings.
"""

import argparse
import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

# Before torch: one thread sums in one order. fairseq's loader reads its configuration objects from
# the checkpoint.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")

import numpy as np
import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.data import data_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.models.roberta import RobertaModel
from fairseq.trainer import Trainer

GOLDEN = Path(__file__).resolve().parent / "golden"
SPLITS = ("train", "valid", "test")
INPUTS = ("text", "roberta_bpe")
TRAINED = ("trained.pt", "prenorm.pt", "roberta.pt")
# What a recording keeps of the folder where it is made.
KEPT = (
    *INPUTS,
    "joint",
    "separate",
    "roberta",
    "initial.pt",
    *TRAINED,
    "arrays.npz",
    "numbers.json",
    "roberta_bpe.pt",
    "roberta_bpe.npz",
)

# ---- fairseq's flags ---------------------------------------------------------------------------
SIZE = "--{0}-embed-dim 32 --{0}-ffn-embed-dim 64 --{0}-attention-heads 4 --{0}-layers 2"
# Without it, this fairseq drops the last batch unless its size is a multiple of 8, in training and
# in generation.
MULTIPLE = "--required-batch-size-multiple 1"
COMMON = (
    "--optimizer adam --adam-betas (0.9,0.98) --clip-norm 0 --weight-decay 0"
    " --lr 5e-3 --lr-scheduler inverse_sqrt --warmup-init-lr 1e-7"
    " --seed 1 --cpu --num-workers 0 --no-progress-bar --log-format simple"
    f" {MULTIPLE} --disable-validation --no-epoch-checkpoints"
)
TRANSLATION = (
    f"--arch transformer {SIZE.format('encoder')} {SIZE.format('decoder')}"
    " --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --adam-eps 1e-9"
    f" --max-tokens 500 {COMMON}"
)
SHARED = f"joint {TRANSLATION} --share-all-embeddings"
PRENORM = "--encoder-normalize-before --decoder-normalize-before --dropout 0.1"
MASKED_LM = "--task masked_lm --criterion masked_lm --arch roberta_base"
TRAIN = {
    "initial.pt": f"{SHARED} --dropout 0 --warmup-updates 4",
    "trained.pt": f"{SHARED} --dropout 0.1 --warmup-updates 100 --max-update 400",
    "prenorm.pt": f"separate {TRANSLATION} {PRENORM} --warmup-updates 4 --max-update 30",
    "roberta.pt": (
        f"roberta {MASKED_LM} {SIZE.format('encoder')}"
        " --max-positions 64 --tokens-per-sample 32 --sample-break-mode complete"
        f" --adam-eps 1e-6 --batch-size 16 {COMMON}"
        " --warmup-updates 4 --max-update 30"
    ),
}
BPE_ROBERTA = (
    f"roberta_bpe {MASKED_LM} --untie-weights-roberta"
    " --encoder-embed-dim 12 --encoder-ffn-embed-dim 20 --encoder-attention-heads 3"
    " --encoder-layers 2 --max-positions 62 --tokens-per-sample 62 --pooler-dropout 0.2"
    f" --batch-size 16 {COMMON}"
)

# ---- inputs ------------------------------------------------------------------------------------
# What byte-level BPE may stumble over: spaces, contractions, numbers, other scripts, line ends, an
# unseen word.
BPE_SENTENCES = [
    ("the small dog sees a bridge .",),
    (" The quiet  garden,  near\tthe house!\n",),
    ("they're 1234 zebras; we'll see: it's OK",),
    ("die grüne Tür ist groß, 你好 🙂",),
    ("",),
    ("a bird finds the boy .", "the boy follows a bird ."),
]


@dataclasses.dataclass(frozen=True)
class Search:
    """Settings of a beam search.

    The limit is one for a whole batch, since fairseq's source length is the batch's padded width:
    int(max_len_a * width + max_len_b) tokens without </s>.
    """

    beam: int
    lenpen: float  # length penalty
    max_len_a: float
    max_len_b: int


SEARCHES = [
    Search(beam=4, lenpen=1.0, max_len_a=0, max_len_b=20),
    Search(beam=4, lenpen=0.6, max_len_a=1.2, max_len_b=10),
    Search(beam=5, lenpen=1.0, max_len_a=1.2, max_len_b=10),
    Search(beam=5, lenpen=0.6, max_len_a=0, max_len_b=20),
    Search(beam=4, lenpen=0.6, max_len_a=0, max_len_b=5),  # cuts most translations off
]


# ---- fairseq's programs ------------------------------------------------------------------------
def run(program: str, arguments: str) -> None:
    """Runs one of fairseq's console scripts in the current folder; errors go to stderr."""
    command = [Path(sys.executable).parent / program, *arguments.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def preprocess() -> None:
    """Binarises the text, in the three forms that the models need."""
    texts = "--trainpref text/train --validpref text/valid --testpref text/test"
    files = f"{texts} --dataset-impl mmap --workers 1"
    run("fairseq-preprocess", f"-s en -t de {files} --joined-dictionary --destdir joint")

    sizes_that_differ = "--nwordssrc 24"
    run("fairseq-preprocess", f"-s en -t de {files} {sizes_that_differ} --destdir separate")

    english = files.replace(" text/", " text/en.")
    run("fairseq-preprocess", f"--only-source {english} --destdir roberta")


# ---- checkpoints -------------------------------------------------------------------------------
def setup(flags: str) -> tuple[Trainer, tasks.FairseqTask]:
    """Returns fairseq's trainer with a new model, as fairseq-train creates it from these flags, and
    the task."""
    parser = options.get_training_parser()
    arguments = options.parse_args_and_arch(parser, flags.split())
    cfg = convert_namespace_to_omegaconf(arguments)
    np.random.seed(cfg.common.seed)
    utils.set_torch_seed(cfg.common.seed)

    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    criterion = task.build_criterion(cfg.criterion)
    return Trainer(cfg, task, model, criterion), task


def strip(path: Path) -> None:
    """Removes the optimizer's state and the timings from a checkpoint; checks that its only class
    is a Namespace."""
    state = torch.load(path)
    state.pop("last_optimizer_state")
    state["extra_state"] = {"train_iterator": state["extra_state"]["train_iterator"]}
    torch.save(state, path)

    with torch.serialization.safe_globals([argparse.Namespace]):
        torch.load(path, weights_only=True)


def save(trainer: Trainer, name: str) -> None:
    """Writes a checkpoint of a trainer that has not begun."""
    trainer.consolidate_optimizer()
    position = {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
    trainer.save_checkpoint(name, {"train_iterator": position})
    strip(Path(name))


def make_checkpoints(trained: Path | None) -> None:
    """Writes initial.pt with fairseq's trainer, the others with fairseq-train or from the folder
    `trained`."""
    trainer, _ = setup(TRAIN["initial.pt"])
    save(trainer, "initial.pt")

    for name in TRAINED:
        if trained:
            shutil.copy(trained / name, name)
            continue
        run("fairseq-train", f"{TRAIN[name]} --save-dir checkpoints")
        shutil.copy("checkpoints/checkpoint_last.pt", name)
        shutil.rmtree("checkpoints")
        strip(Path(name))


def load(name: str) -> tuple[torch.nn.Module, tasks.FairseqTask]:
    """Returns the model of a checkpoint, as fairseq-generate reads it, and its task."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([name])
    return model.eval(), task


# ---- what is recorded --------------------------------------------------------------------------
def as_int32(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().astype(np.int32)


def ten_steps(arrays: dict[str, np.ndarray]) -> list[dict[str, float]]:
    """Runs ten updates from initial.pt on ten fixed batches with fairseq's trainer, optimizer and
    schedule, without dropout.

    Adds step<n>.source (padded at the left), step<n>.previous and step<n>.target, int32
    [16, length]. Returns for each step the sums of the label-smoothed loss and of the negative
    log-likelihood in nats before the update, the number of target tokens (fairseq divides the
    gradient by it), the norm of that gradient and the update's learning rate.
    """
    trainer, task = setup(TRAIN["initial.pt"])
    trainer.load_checkpoint("initial.pt", reset_optimizer=True, reset_lr_scheduler=True)
    task.load_dataset("train")
    data = task.dataset("train")

    steps = []
    for number in range(10):
        first = 16 * number
        sample = data.collater([data[index] for index in range(first, first + 16)])
        inputs = sample["net_input"]
        arrays[f"step{number}.source"] = as_int32(inputs["src_tokens"])
        arrays[f"step{number}.previous"] = as_int32(inputs["prev_output_tokens"])
        arrays[f"step{number}.target"] = as_int32(sample["target"])

        trainer.model.train()
        with torch.no_grad():
            _, tokens, log = trainer.criterion(trainer.model, sample)
        learning_rate = trainer.get_lr()
        with metrics.aggregate(new_root=True) as meters:
            trainer.train_step([sample])
        steps.append(
            {
                "loss_sum": float(log["loss"]),
                "nll_sum": float(log["nll_loss"]),
                "tokens": int(tokens),
                "gradient_norm": float(meters["gnorm"].avg),
                "learning_rate": float(learning_rate),
            }
        )
    return steps


def translation_logits(name: str, arrays: dict[str, np.ndarray]) -> None:
    """Computes logits of six test pairs, with the source padded at the left, as fairseq does, and
    at the right.

    Adds <name>.left.source, <name>.right.source and <name>.previous, int32 [6, length], and
    <name>.left.logits and <name>.right.logits, float32 [6, length, words].
    """
    model, task = load(f"{name}.pt")
    task.load_dataset("test")
    data = task.dataset("test")
    sample = data.collater([data[index] for index in range(6)])
    inputs = sample["net_input"]
    previous = inputs["prev_output_tokens"]
    lengths = inputs["src_lengths"]
    left = inputs["src_tokens"]

    pad = task.source_dictionary.pad()
    rows = [row[row != pad] for row in left]
    right = data_utils.collate_tokens(rows, pad, left_pad=False)

    arrays[f"{name}.previous"] = as_int32(previous)
    for side, source in (("left", left), ("right", right)):
        with torch.no_grad():
            logits, _ = model(source, lengths, previous)
        arrays[f"{name}.{side}.source"] = as_int32(source)
        arrays[f"{name}.{side}.logits"] = logits.numpy()


def roberta_logits(arrays: dict[str, np.ndarray]) -> None:
    """Computes logits of roberta.pt at masked positions of six sentences: <s> words </s>, padded at
    the right.

    Adds roberta.tokens int32 [6, length], roberta.masked bool of the same shape, roberta.logits
    float32 [masked positions, words] in the order of the rows, and roberta.all_logits float32
    [6, length, words].
    """
    model, task = load("roberta.pt")
    dictionary = task.source_dictionary
    lines = Path("text/test.en").read_text(encoding="utf-8").splitlines()[:6]
    rows = []
    for line in lines:
        rows.append(dictionary.encode_line(f"<s> {line}", add_if_not_exist=False).long())
    tokens = data_utils.collate_tokens(rows, dictionary.pad())

    position = torch.arange(tokens.shape[1])
    is_word = tokens.ne(dictionary.pad()) & tokens.ne(dictionary.eos())
    masked = (position % 4 == 2) & is_word
    tokens[masked] = dictionary.index("<mask>")
    with torch.no_grad():
        logits, _ = model(src_tokens=tokens, masked_tokens=masked)
        all_logits, _ = model(src_tokens=tokens)

    arrays["roberta.tokens"] = tokens.int().numpy()
    arrays["roberta.masked"] = masked.numpy()
    arrays["roberta.logits"] = logits.numpy()
    arrays["roberta.all_logits"] = all_logits.numpy()


def make_roberta_bpe() -> None:
    """Writes roberta_bpe.pt: random weights, and a classification head, "three"."""
    trainer, _ = setup(BPE_ROBERTA)
    model = trainer.model
    model.register_classification_head("three", num_classes=3)
    with torch.no_grad():  # biases and norms that are not 0 and 1: a lost one is noticed
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    save(trainer, "roberta_bpe.pt")


def roberta_bpe(trained: Path | None) -> None:
    """Writes roberta_bpe.pt (or takes it from the folder `trained`) and roberta_bpe.npz.

    The latter has sentences and seconds (str [6]; a second is "" where a sentence is alone), tokens
    int32 [6, length] as the hub interface encodes them, padded at the right with <pad>, decoded
    (str [6], the pair's is its first), masked int32 [6], the position of a <mask> that replaces a
    token (-1: none), logits float32 [33, words] at the real tokens of the first two rows with that
    mask, and head float32 [6, 3], the classification head's logits without it.
    """
    if trained:
        shutil.copy(trained / "roberta_bpe.pt", ".")
    else:
        make_roberta_bpe()
    files = {
        "gpt2_encoder_json": "roberta_bpe/encoder.json",
        "gpt2_vocab_bpe": "roberta_bpe/vocab.bpe",
    }
    hub = RobertaModel.from_pretrained(".", "roberta_bpe.pt", "./roberta_bpe", **files).eval()
    pad = hub.task.source_dictionary.pad()

    seconds = []
    rows = []
    decoded = []
    masked = []
    for sentences in BPE_SENTENCES:
        seconds.append(sentences[1] if len(sentences) > 1 else "")
        row = hub.encode(*sentences)
        rows.append(row)
        text = hub.decode(row)
        decoded.append(text if isinstance(text, str) else text[0])
        masked.append(len(row) // 2 if len(row) > 2 else -1)

    tokens = data_utils.collate_tokens(rows, pad)
    masked = torch.tensor(masked)
    with_mask = tokens[:2].clone()
    with_mask[[0, 1], masked[:2]] = hub.task.mask_idx
    with torch.no_grad():
        logits, _ = hub.model(with_mask)
        head = hub.predict("three", tokens, return_logits=True)

    np.savez_compressed(
        "roberta_bpe.npz",
        sentences=np.array([sentences[0] for sentences in BPE_SENTENCES]),
        seconds=np.array(seconds),
        tokens=as_int32(tokens),
        decoded=np.array(decoded),
        masked=as_int32(masked),
        logits=logits[with_mask.ne(pad)].numpy(),
        head=head.numpy(),
    )


def beam_search(arrays: dict[str, np.ndarray]) -> list[dict]:
    """Translates the test sentences, as one batch, with trained.pt and fairseq's SequenceGenerator.

    Adds search.source int32 [12, length], padded at the left, and search.index int32 [12]: which
    sentences these are. Returns for each of SEARCHES its settings and, for each row, the
    hypotheses, best first: tokens with </s>, score (sum of log-probabilities / length with </s> **
    lenpen), log-probabilities of the tokens.
    """
    model, task = load("trained.pt")
    task.load_dataset("test")
    data = task.dataset("test")
    sample = data.collater([data[index] for index in range(len(data))])
    arrays["search.source"] = as_int32(sample["net_input"]["src_tokens"])
    arrays["search.index"] = as_int32(sample["id"])

    searches = []
    for search in SEARCHES:
        settings = dataclasses.asdict(search)
        generator = task.build_generator([model], argparse.Namespace(**settings))
        sentences = []
        for hypotheses in task.inference_step(generator, [model], sample):
            sentences.append([written(hypothesis) for hypothesis in hypotheses])
        searches.append({**settings, "sentences": sentences})
    return searches


def written(hypothesis: dict) -> dict:
    """Returns a hypothesis of fairseq's as numbers.json has it."""
    log_probabilities = [round(float(value), 7) for value in hypothesis["positional_scores"]]
    return {
        "tokens": hypothesis["tokens"].tolist(),
        "score": float(hypothesis["score"]),
        "log_probabilities": log_probabilities,
    }


def write_numbers(numbers: dict[str, list]) -> None:
    """Writes numbers.json: a line for each entry of a list."""
    lists = []
    for key, entries in numbers.items():
        lines = ",\n  ".join(map(json.dumps, entries))
        lists.append(f' "{key}": [\n  {lines}\n ]')
    content = ",\n".join(lists)
    Path("numbers.json").write_text(f"{{\n{content}\n}}\n")


def record(trained: Path | None) -> None:
    """Creates all files of a recording in the current folder."""
    for name in INPUTS:
        shutil.copytree(GOLDEN / name, name)
    # fairseq-preprocess without a language takes the prefix as the file's name.
    for split in SPLITS:
        shutil.copy(f"text/{split}.en", f"text/en.{split}")
    preprocess()
    make_checkpoints(trained)

    arrays: dict[str, np.ndarray] = {}
    numbers = {"ten_steps": ten_steps(arrays), "searches": beam_search(arrays)}
    for name in ("initial", "trained", "prenorm"):
        translation_logits(name, arrays)
    roberta_logits(arrays)
    np.savez_compressed("arrays.npz", **arrays)
    roberta_bpe(trained)
    write_numbers(numbers)


# ---- the command -------------------------------------------------------------------------------
def remove_what_is_not_kept() -> None:
    """Removes the copies of the text, the logs, and the binarised text that is not compared."""
    unneeded = [*Path("text").glob("en.*"), *Path().glob("*/preprocess.log")]
    for name in ("separate", "roberta"):
        unneeded += Path(name).glob("*.[bi]*")
    for path in unneeded:
        path.unlink()


def replace(out: Path) -> None:
    """Moves a whole recording from the current folder to `out`, in place of an older one."""
    for name in KEPT:
        target = out / name
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(name, target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=GOLDEN, help="folder to write")
    parser.add_argument(
        "--trained", type=Path, help="folder of a recording: take its trained checkpoints"
    )
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    trained = arguments.trained
    if trained:
        trained = trained.resolve()

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # hydra's and torch's, about what fairseq's age explains
    logging.disable(logging.WARNING)  # fairseq describes each model at length

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that no checkpoint holds a path of this machine
        record(trained)
        remove_what_is_not_kept()
        replace(out)  # only now: a run that failed leaves the old recording whole
        os.chdir(out)

    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
