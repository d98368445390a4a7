"""What a trial must reach, and which recipes the tables of results have. Standard library only,
Python 3.9."""

from __future__ import annotations

from dataclasses import dataclass

# The ranges of a trial's final metrics, by script. Convergence tests (tests/trials.py) read them
# here, too.
LEARNED = {
    "resnet50": {"top1": (0.9, 1.0), "top5": (0.9, 1.0), "loss": (0.0, 0.6)},  # chance: 0.1 and 2.3
    "dlrm": {"auc": (0.78, 0.86), "ne": (0.0, 0.82)},
    "glue": {"accuracy": (0.95, 1.0), "loss": (0.0, 0.2)},
    "squad": {"exact_match": (0.6, 1.0), "f1": (0.7, 1.0), "loss": (0.0, 0.8)},
    "transformer": {"bleu": (25.0, 100.0), "ppl": (1.0, 5.0)},  # the right words in any order: 6
    "pretrain": {"accuracy": (0.33, 1.0), "loss": (0.0, 2.3)},  # always the commonest token: 0.085
    "tagging": {"f1": (0.9, 1.0), "accuracy": (0.95, 1.0), "loss": (0.0, 0.2)},  # all O: f1 0
}


@dataclass(frozen=True)
class Script:
    """A script in train/, and how its trial is run, killed and stopped."""

    name: str
    words: str  # of make train
    kill_at: int  # a step between two checkpoints of the trial
    # Flags of a run that does not end by itself within an hour; it saves when it is stopped.
    long: str
    label: str
    predicts: str = ""  # "pictures" or "sentences", by make predict with its export
    why_not: str = ""  # why its export predicts none of these, where make predict is for such ones


SCRIPTS = (
    Script(
        "resnet50",
        "MODEL=resnet50",
        kill_at=110,  # after 100
        long="--epochs 100000 --eval-every 100000 --save-every 10000000 --log-every 5",
        label="ResNet-50",
        predicts="pictures",
    ),
    Script(
        "dlrm",
        "MODEL=dlrm",
        kill_at=160,  # after 128
        long="--epochs 100000 --save-every 10000000 --log-every 5",
        label="DLRM",
        why_not="make predict takes clicks by the columns of a log of your own, and the trial's are"
        " synthetic, without columns (docs/exports.md)",
    ),
    Script(
        "transformer",
        "MODEL=transformer",
        kill_at=380,  # after 350
        long="--updates 10000000 --eval-every 10000000 --save-every 10000000 --log-every 5",
        label="Transformer",
    ),
    Script(
        "glue",
        "MODEL=bert TASK=sst2",
        kill_at=100,  # after 64
        long="--epochs 100000 --eval-every 10000000 --log-every 5",
        label="BERT, fine-tuning",
        predicts="sentences",
    ),
    Script(
        "squad",
        "MODEL=bert TASK=squad",
        kill_at=100,  # after 73
        long="--epochs 100000 --eval-every 10000000 --log-every 5",
        label="BERT, question answering",
    ),
    Script(
        "pretrain",
        "MODEL=bert TASK=pretrain",
        kill_at=280,  # after 250
        long="--steps 10000000 --eval-every 10000000 --log-every 5",
        label="BERT, pretraining",
    ),
    Script(
        "tagging",
        "MODEL=bert TASK=ner",
        kill_at=100,  # after 64
        long="--epochs 100000 --eval-every 10000000 --log-every 5",
        label="BERT, named entities",
        why_not="its answers are entities, and this check compares probabilities of classes",
    ),
)


# How far a probability may be from that of plain PyTorch in float32 on the CPU, by the precision of
# the device: the difference of their logarithms, which is that of logits, by their size. bfloat16
# keeps 8 bits of each number on its way; a TPU's float32 has an exponential, a square root and sums
# of its own.
APART = {"bfloat16": 0.1, "float32": 1e-4}
RIGHT = 0.9  # of the sentences must have the right label; the trial's evaluation reaches 0.95


@dataclass(frozen=True)
class Recipe:
    """A published recipe, as `--recipe` runs it."""

    words: str  # of make train, without DATA=
    label: str
    target: str  # what was published, in words, and by whom; "": nothing was


RECIPES = {
    "resnet50": Recipe(
        words="MODEL=resnet50 PRESET=full",
        label="ResNet-50 v1.5, ImageNet, 90 epochs",
        target="76.3 % top-1, Goyal et al. 2017",
    ),
    "resnet50-modern": Recipe(
        words="MODEL=resnet50 PRESET=modern",
        label="ResNet-50 v1.5 `modern`, ImageNet, 600 epochs",
        target="80.7 % top-1, Vryniotis 2021",
    ),
    "dlrm-v1": Recipe(
        words="MODEL=dlrm PRESET=mlperf_v1",
        label="DLRM `mlperf_v1`, Criteo Terabyte",
        target="AUC 0.8025, MLPerf",
    ),
    "dlrm-v2": Recipe(
        words="MODEL=dlrm PRESET=mlperf_v2",
        label="DLRM-DCNv2 `mlperf_v2`, Criteo Terabyte",
        target="AUC 0.80275, MLPerf",
    ),
    "transformer-big": Recipe(
        words="MODEL=transformer PRESET=big",
        label="Transformer big, WMT'16 en-de",
        target="28.6 BLEU on newstest2014, Ott et al. 2018",
    ),
    "transformer-wmt18": Recipe(
        words="MODEL=transformer PRESET=wmt18",
        label="Transformer `wmt18`",
        target="29.0 BLEU on newstest2017, fairseq",
    ),
    "bert-mrpc": Recipe(
        words="MODEL=bert TASK=mrpc PRESET=full",
        label="BERT-base, MRPC",
        target="F1 88.9 on the test set, Devlin et al. 2019",
    ),
    "bert-squad": Recipe(
        words="MODEL=bert TASK=squad PRESET=full",
        label="BERT-base, SQuAD 1.1",
        target="F1 88.5, exact match 80.8 on the development set, Devlin et al. 2019",
    ),
    "bert-ner": Recipe(
        words="MODEL=bert TASK=ner PRESET=full",
        label="BERT-base cased, CoNLL-2003",
        target="F1 92.4 on the test set, with the context of whole documents, Devlin et al. 2019",
    ),
    "bert-pretrain": Recipe(
        words="MODEL=bert TASK=pretrain PRESET=full",
        label="BERT-base, pretraining",
        target="",
    ),
}

# A step that is large enough for the chip, and not its host, to be what takes the time: ResNet-50's
# own, on synthetic images of 224 pixels. Its 10 classes instead of 1,000 take 0.1 % of the work.
SPEED_WORDS = "MODEL=resnet50 PRESET=full DATA=synthetic"
SPEED_BATCH = 128  # images per chip, at most
SPEED_IMAGES = 2048  # in the synthetic data
SPEED_STEPS = 60  # at least

# How much slower than its estimate a step may be. Others' published logs took 0.57 to 1.0 of
# libtpu's estimate of such steps (docs/compile.md); twice leaves room for what carries no estimate.
SLOW_ESTIMATE = 2.0
# Where the clock of a chip is not published there are no seconds: the roofline is a lower bound, of
# which ResNet-50's estimate on v5e is the double.
SLOW_ROOFLINE = 4.0
INPUT_BOUND = 0.1  # share of input wait from which on the step says nothing about the chip

# By what torch_xla calls a device: the name of its generation for make compile, and how many
# dimensions its shapes have.
GENERATIONS = {
    "TPU v2": ("v2", 2),
    "TPU v3": ("v3", 2),
    "TPU v4": ("v4", 3),
    "TPU v5 lite": ("v5e", 2),
    "TPU v5": ("v5p", 3),
    "TPU v6 lite": ("v6e", 2),
    "TPU7x": ("TPU7x", 3),
}
TWO_CORES = ("TPU v2", "TPU v3", "TPU7x")  # two devices per chip
SHAPES = {  # chips: shape of two, of three dimensions
    1: ("1x1", "1x1x1"),
    4: ("2x2", "2x2x1"),
    8: ("2x4", "2x2x2"),
    16: ("4x4", "2x2x4"),
    32: ("4x8", "2x4x4"),
    64: ("8x8", "4x4x4"),
    128: ("8x16", "4x4x8"),
    256: ("16x16", "4x8x8"),
}


def topology(kind: str, devices: int) -> str:
    """Returns what make compile calls so many devices of this kind, "v5e:2x4"; "" where it knows
    none."""
    if kind not in GENERATIONS:
        return ""
    generation, dimensions = GENERATIONS[kind]
    chips = devices // 2 if kind in TWO_CORES else devices
    shapes = SHAPES.get(chips)
    if shapes is None:
        return ""
    shape = shapes[dimensions - 2]
    return f"{generation}:{shape}"
