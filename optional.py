"""What a copy of a script, or an installation, may come without: one table, PARTS, and `load`.

`make copy` (copy_model.py) reads the table for what a copy gets, `load` for the sentence about what
is missing, and the tests read it for both. Code that needs a part loads it here by its name, or
asks `is_here` first; so it works in a copy without the part. Only the standard library is needed.
"""

import importlib
import importlib.util
from collections.abc import Set
from dataclasses import dataclass
from types import ModuleType

from errors import InputError

NOT_IN_THIS_COPY = (
    "{needed_by} needs {entry}, not in this copy: make copy … {given} brings it to a new one"
)


@dataclass(frozen=True)
class Part:
    """A part of the project, or a library, that may be missing.

    Attributes:
        name: what `load` calls it.
        modules: what it consists of; a package stands for all its files.
        given: what `make copy` is given for it, such as "WITH=watch", one of these; none: no copy
            has it.
        of: models or scripts that alone have it, such as "MODEL=dlrm" or "SCRIPT=glue"; none: all.
        needed_by: the flags that need it; {asked} is what the caller of `load` fills in.
        gives: what a copy can do by it, for its README; "": another part of the same argument of
            `make copy` says so.
        scripts: those that it is of use for; none: all.
        missing: the sentence of the InputError that `load` raises where it is missing; it may name
            {needed_by}, {entry}, {given}, {asked} and the {error} of the import.
        entry: the module that `load` imports; "": the first of `modules`.
        whole: a copy gets all files of `modules`; otherwise `entry` and what is imported from
            there.
        foreign: it is a library, or needs one of its own: any ImportError means that it is missing.
        attribute: what `entry` has, if it is not just a folder of that name.
    """

    name: str
    modules: tuple[str, ...]
    given: tuple[str, ...]
    needed_by: str
    gives: str = ""
    scripts: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    missing: str = NOT_IN_THIS_COPY
    entry: str = ""
    whole: bool = True
    foreign: bool = False
    attribute: str = ""

    def has(self, module: str) -> bool:
        """Tells whether a module, by its dotted name, belongs to it."""
        return any(module == own or module.startswith(f"{own}.") for own in self.modules)

    def loaded(self) -> str:
        """Returns the dotted name of the module that `load` imports."""
        return self.entry or self.modules[0]


# The encoders: --model -> the module of its record. A new one is a file in models/encoders, and a
# line here. The record of an architecture has the name that transformers gives it (model_type). The
# Makefile reads these lines as text.
ENCODERS = {
    "bert": "models.encoders.bert",
    "distilbert": "models.encoders.distilbert",
    "roberta": "models.encoders.roberta",
    "xlnet": "models.encoders.xlnet",
    "fairseq-roberta": "models.encoders.fairseq_roberta",
    "auto": "models.encoders.auto",
}
PRETRAINED = tuple(name for name in ENCODERS if name != "auto")  # auto is for fine-tuning only

# The tasks of the encoders that have a script of their own: TASK= -> the module of the script. All
# others are tasks of GLUE, which have train/glue.py. The Makefile reads these lines as text.
SCRIPTS_OF_TASKS = {
    "pretrain": "train.pretrain",
    "squad": "train.squad",
    "ner": "train.tagging",
}

NO_DEVICE = (
    "--device is {asked}, but what it needs is not here ({error}); install requirements.txt, "
    "copy with DEVICE={asked}, or give another --device (cpu needs no torch_xla)"
)

NO_KIND = (
    "{needed_by} needs {entry}, not in this copy, which is another model's; predict in the "
    "project's folder, or in a copy of that model that was made {given}"
)

PARTS = (
    # What any copy can do without.
    Part(
        name="watch",
        modules=("train.common.watch",),
        given=("WITH=watch",),
        needed_by="--profile, --stall-after, --price, --tracker, --log, --report or --kill-at",
        gives="curves, the bar, profiles, the watchdog and other things that change no number",
    ),
    Part(
        name="sharding",
        modules=("train.common.sharding",),
        given=("WITH=sharding",),
        needed_by="--mesh, --shard-state or --remat",
        gives=(
            "layers and optimizer state sharded over devices (`--mesh`, `--shard-state`, `--remat`)"
        ),
        scripts=("resnet50", "transformer", "glue", "pretrain", "squad", "tagging"),
    ),
    Part(
        name="hub_images",
        modules=("data.hub_images",),
        given=("WITH=hub_images",),
        needed_by="{asked}",  # a data set of the hub, or a folder of tables
        gives="images from the Hugging Face hub",
        scripts=("resnet50",),
    ),
    Part(
        name="shards",
        modules=("data.shards",),
        given=("WITH=shards",),
        needed_by="{asked}",  # a folder or URL of shards
        gives="images in parquet files, from a bucket",
        scripts=("resnet50",),
    ),
    # `make predict`, and what it needs for each kind of export.
    Part(
        name="predict",
        modules=("train.predict",),
        given=("WITH=predict",),
        needed_by="make predict",
        gives="predictions, `python -m train.predict new --model-dir runs/<name>/export --data …`",
        scripts=("resnet50", "dlrm", "glue", "squad", "tagging"),
    ),
    Part(
        name="predict_pictures",
        modules=("train.prediction.pictures",),
        given=("WITH=predict",),
        of=("MODEL=resnet50",),
        needed_by="a model of pictures",
        missing=NO_KIND,
    ),
    Part(
        name="predict_sentences",
        modules=("train.prediction.sentences",),
        given=("WITH=predict",),
        of=("SCRIPT=glue",),
        needed_by="a model of sentences",
        missing=NO_KIND,
    ),
    Part(
        name="predict_answers",
        modules=("train.prediction.answers",),
        given=("WITH=predict",),
        of=("SCRIPT=squad",),
        needed_by="a model that answers questions",
        missing=NO_KIND,
    ),
    Part(
        name="predict_entities",
        modules=("train.prediction.entities",),
        given=("WITH=predict",),
        of=("SCRIPT=tagging",),
        needed_by="a model of entities",
        missing=NO_KIND,
    ),
    Part(
        name="predict_submission",
        modules=("train.prediction.submission",),
        given=("WITH=predict",),
        of=("SCRIPT=glue",),
        needed_by="--task",
        missing=NO_KIND,
    ),
    Part(
        name="predict_clicks",
        modules=("train.prediction.clicks",),
        given=("WITH=predict",),
        of=("MODEL=dlrm",),
        needed_by="a model of clicks",
        missing=NO_KIND,
    ),
    Part(
        name="own_clicks",
        modules=("data.clicks",),
        given=("WITH=predict",),
        of=("MODEL=dlrm",),
        needed_by="--evaluate on clicks of your own",
    ),
    # The backends of train/common/device.py: a copy for one --device goes without the other.
    Part(
        name="xla",
        modules=("train.common.xla", "train.common.embedding.xla_devices", "torch_xla"),
        entry="train.common.xla.backend",
        whole=False,
        given=("DEVICE=xla",),
        needed_by="--device xla",
        gives="TPUs, and XLA on this machine (`--device xla`)",
        missing=NO_DEVICE,
        foreign=True,
    ),
    Part(
        name="eager",
        modules=("train.common.eager", "train.common.start_processes"),
        given=("DEVICE=cpu", "DEVICE=cuda", "DEVICE=tpu"),
        needed_by="--device cpu, cuda or tpu",
        gives="plain PyTorch, on the CPU or a GPU (`--device cpu`, `--device cuda`)",
        missing=NO_DEVICE,
        foreign=True,
    ),
    Part(
        name="process_devices",
        modules=("train.common.embedding.process_devices",),
        given=("DEVICE=cpu", "DEVICE=cuda", "DEVICE=tpu"),
        of=("MODEL=dlrm",),
        needed_by="--device cpu or cuda on several processes",
        missing=NO_DEVICE,
    ),
    Part(
        name="torchtpu",
        modules=("train.common.torchtpu",),
        given=("DEVICE=tpu",),
        needed_by="--device tpu",
    ),
    # What no copy has.
    Part(
        name="wandb",
        modules=("wandb",),
        attribute="init",  # its own runs leave a folder of that name
        given=(),
        needed_by="--tracker wandb",
        missing=(
            "--tracker is wandb, but its library is not here ({error}); pip install -r "
            "requirements-wandb.txt (in a copy: pip install wandb), or leave the flag out"
        ),
        foreign=True,
    ),
    Part(
        name="compiler",  # counts flops for the MFU of train/common/watch
        modules=("tpu",),
        entry="tpu.compiler",
        given=(),
        needed_by="MFU",
        missing="{needed_by} needs {entry}, which is in the repository, not in this copy",
    ),
)


def encoder(name: str) -> Part:
    """Returns the record of an encoder as a part. Unlike one of PARTS it is also in a copy whose
    files import it."""
    return Part(
        name=name,
        modules=(ENCODERS[name],),
        given=(f"MODEL={name}",),
        needed_by=f"--model {name}",
    )


def part(name: str) -> Part:
    """Returns the part of this name."""
    if name in ENCODERS:
        return encoder(name)
    (found,) = [each for each in PARTS if each.name == name]
    return found


def names(argument: str) -> list[str]:
    """Returns what an argument of `make copy` can be for the sake of a part: of "WITH" watch, …"""
    found = []
    for each in PARTS:
        for given in each.given:
            key, _, value = given.partition("=")
            if key == argument and value not in found:
                found.append(value)
    return found


def gives(argument: str) -> str:
    """Returns what an argument of `make copy`, such as "WITH=watch", makes a copy able to do."""
    (text,) = [each.gives for each in PARTS if argument in each.given and each.gives]
    return text


def of_use(argument: str, script: str) -> bool:
    """Tells whether an argument of `make copy`, such as "WITH=shards", is of use for a script."""
    (found,) = [each for each in PARTS if argument in each.given and each.gives]
    return not found.scripts or script in found.scripts


def in_copy(given: Set[str]) -> list[Part]:
    """Returns the parts that a copy has, for what `make copy` is given, "MODEL=bert", …, and for
    its script, "SCRIPT=glue"."""
    found = []
    for each in [*PARTS, *map(encoder, ENCODERS)]:
        is_of_model = not each.of or given & set(each.of)
        if given & set(each.given) and is_of_model:
            found.append(each)
    return found


def is_here(name: str) -> bool:
    """Tells whether the files of a part are here; it imports none of them."""
    module = part(name).loaded()
    package = module.rpartition(".")[0]
    if package and importlib.util.find_spec(package) is None:
        return False
    return importlib.util.find_spec(module) is not None


def load(name: str, asked: str = "") -> ModuleType:
    """Imports the entry of a part and returns it.

    Args:
        name: of the part.
        asked: what the user has asked for that needs it, where the table cannot know it.
    Raises:
        InputError: it is missing; with its sentence.
    """
    needed = part(name)
    entry = needed.loaded()
    try:
        module = importlib.import_module(entry)
        if needed.attribute and not hasattr(module, needed.attribute):
            raise ImportError(f"cannot import name {needed.attribute!r} from {entry!r}")
    except ImportError as error:
        absent = error.name or ""
        is_entry = entry == absent or entry.startswith(f"{absent}.")
        if not is_entry and not needed.foreign:
            raise  # the part is here, and something else is wrong
        sentence = needed.missing.format(
            needed_by=needed.needed_by.format(asked=asked),
            entry=entry,
            given=" or ".join(needed.given),
            asked=asked,
            error=error,
        )
        raise InputError(sentence) from error
    return module
