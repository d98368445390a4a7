"""The README of a copy: how to run it, what to change first, what each file is, what can go."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import optional

PAGE = "docs/your_task.md"

# The class of a script's training data, or of one of its models': what data of your own takes the
# place of.
DATA_SETS = {
    "resnet50": ("data/imagenet.py", "Images"),
    "dlrm": ("data/criteo.py", "ClickLog"),
    "transformer": ("data/wmt.py", "TranslationPairs"),
    "glue": ("data/sentences.py", "Encoded"),
    "squad": ("data/squad.py", "Windows"),
    "pretrain": ("data/pretraining.py", "MaskedText"),
    "tagging": ("data/windows.py", "Encoded"),
    "pretrain xlnet": ("data/pretraining.py", "PermutedText"),
}

# What is changed for a task of one's own, in this order -> the name of it in a script.
PLACES = {
    "which data are trained and evaluated on": "open_data",
    "the network and its optimizer": "build",
    "the loss": "forward",
    "what an evaluation computes of a batch; `evaluate` makes the metrics of it": "eval_step",
    "what is left at the end; `open_evaluation` reads it again": "export",
    "flags and their defaults; `TINY` is the trial": "Config",
}
# Of a script without that name.
INSTEAD = {"forward": "train_step"}

# The groups of the files, in the order in which they are listed.
ORDER = ("train/", "tests/", "models/", "data/", "train/common/", "")


@dataclass(frozen=True)
class Removable:
    """What a copy has for one argument of `make copy`, and can go without."""

    given: str  # that argument: "DEVICE=xla", "WITH=watch"
    files: list[Path]
    distributions: list[str]  # lines of requirements.txt that nothing else needs, by their names


@dataclass(frozen=True)
class Copy:
    """A copy that is being made.

    Attributes:
        script: "glue".
        model: an encoder's name, for --model; "": the script has no such flag.
        device: for which it is; "": for all.
        files: that were copied, relative to its folder.
        root: the folder with these files.
        torchrec: whether it has a requirements-torchrec.txt.
        removable: what can go.
        left_out: arguments of `make copy` that would bring more, such as "WITH=watch".
        terms: files of the project that come along: "LICENSE", "NOTICE", "CITATION.cff".
    """

    script: str
    model: str
    device: str
    files: list[Path]
    root: Path
    torchrec: bool
    removable: list[Removable]
    left_out: list[str]
    terms: list[str]

    @property
    def runs_on_tpus(self) -> bool:
        return self.device in ("", "xla")

    @property
    def choice(self) -> str:
        """The flags with which its script runs."""
        flags = f" --model {self.model}" if self.model else ""
        return flags if self.runs_on_tpus else f"{flags} --device {self.device}"


def readme(copy: Copy) -> str:
    """Returns the README of a copy."""
    sections = [
        f"# train/{copy.script}.py{copy.choice}, a copy of the XLA model zoo's",
        "\n".join(commands(copy)),
        on_tpus(copy),
        "## Change first",
        f"{PAGE}, in the repository, says what each place must keep to, and shows it in two "
        "examples that\nrun. The lines are those of the day of the copy.",
        "\n".join(places(copy)),
        "Change train/ and models/ as you like; train/common/run.py says which order of a step's "
        "end must stay.\nFiles of docs/ and tests/ that comments and messages name are in the "
        "repository, not here.",
        "## Files",
        "\n".join(file_table(copy)),
    ]
    if copy.removable:
        sections += [
            "## What can be deleted",
            "What needs one of these files and does not find it ends with a sentence that says "
            "so. Of two rows with\n`--device` one must stay.",
            "\n".join(removable_table(copy)),
        ]
    if copy.left_out:
        sections += [
            "## What was left out",
            "In the repository, `make copy` with one of these, or with several "
            '(`WITH="watch sharding"`), makes a copy\nthat has it; and into this one its files '
            "can be copied by hand.",
            "\n".join(left_out_table(copy)),
        ]
    sections += ["## Terms", of_the_zoo(copy)]
    return "\n\n".join(sections) + "\n"


def of_the_zoo(copy: Copy) -> str:
    """Returns by what terms the copy may be used, and how the project is cited."""
    said = "The XLA model zoo has no LICENSE yet: ask its owner for its terms."
    if "LICENSE" in copy.terms:
        said = "LICENSE is that of the XLA model zoo: it stays with its code."
    if "CITATION.cff" in copy.terms:
        said += " CITATION.cff says how to cite it."
    return said


def commands(copy: Copy) -> list[str]:
    """Returns the lines of code that install the copy, run it and test it."""
    install = "pip install -r requirements.txt"
    if copy.torchrec:
        install += " && pip install --no-deps -r requirements-torchrec.txt"
    run = f"python -m train.{copy.script} tiny"
    lines = {
        f"{run}{copy.choice}": "a trial on synthetic data",
        f"{run} --help": "all flags",
        "make test": "does it learn, and resume exactly? some minutes on two CPU cores",
    }
    width = max(map(len, lines))
    made = [f"    python3.11 -m venv .venv && . .venv/bin/activate && {install}"]
    made += [f"    {line:{width}}   # {what}" for line, what in lines.items()]
    return made


def on_tpus(copy: Copy) -> str:
    """Returns what TPUs need."""
    if not copy.runs_on_tpus:
        return "For TPUs: copy it with DEVICE=xla. `make data` is in the repository."
    pins = (copy.root / "requirements-tpu.txt").read_text().splitlines()
    libtpu = next(line.split()[0] for line in pins if not line.startswith("#"))
    return (
        "torch_xla is linked to libpython: on Debian and Ubuntu "
        "`sudo apt-get install -y libpython3.11`.\n"
        f"On a TPU VM: `pip install {libtpu}`, then a preset with `--data`. "
        "`make data` is in the repository."
    )


def places(copy: Copy) -> list[str]:
    """Returns a table of the places that another task changes, each with its line."""
    script = f"train/{copy.script}.py"
    lines = definitions(copy.root / script)
    table = ["| to change | edit |", "|---|---|"]

    def add(what: str, file: str, line: int, name: str) -> None:
        table.append(f"| {what} | [{file}:{line}]({file}#L{line}) `{name}` |")

    for what, name in PLACES.items():
        if name not in lines:
            name = INSTEAD[name]
        if name == "open_data":
            of_model = f"{copy.script} {copy.model}"
            file, data_set = DATA_SETS.get(of_model, DATA_SETS[copy.script])
            line = definitions(copy.root / file)[data_set]
            add("the data: a class with `__len__`, and `example` or `batch`", file, line, data_set)
        add(what, script, lines[name], name)
    test = f"tests/test_{copy.script}.py"
    table.append(f"| what `make test` trains, and what it must reach | [{test}]({test}) `TRIAL` |")
    return table


def definitions(path: Path) -> dict[str, int]:
    """Returns the classes and functions of a file, by name, with the lines on which they begin."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node.lineno
    return found


def file_table(copy: Copy) -> list[str]:
    """Returns a table of the files, each with the first sentence of its docstring."""
    table = ["| file | what it is |", "|---|---|"]
    for file in sorted(copy.files, key=rank):
        said = summary(copy.root / file)
        if said:  # an empty __init__.py says nothing
            table.append(f"| [{file}]({file}) | {said} |")
    return table


def rank(file: Path) -> tuple[int, Path]:
    """Returns a file's place in the table: its group, and its name."""
    folder = f"{file.parent}/"
    groups = [number for number, group in enumerate(ORDER) if folder.startswith(group)]
    longest = max(groups, key=lambda number: len(ORDER[number]))
    return longest, file


def summary(path: Path) -> str:
    """Returns the first sentence of a file's docstring; "" where it has none."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z])", paragraph)[0]
    return sentence.replace("|", r"\|")


def removable_table(copy: Copy) -> list[str]:
    """Returns a table of what can be deleted, and of what is lost."""
    table = ["| to delete | is lost |", "|---|---|"]
    for part in copy.removable:
        what = ", ".join(f"`{name}`" for name in folded(part.files, copy.files))
        if part.distributions:
            what += f"; {', '.join(part.distributions)} of requirements.txt"
        table.append(f"| {what} | {optional.gives(part.given)} |")
    return table


def folded(files: list[Path], all_files: list[Path]) -> list[str]:
    """Returns the names of files, a folder in place of all that the copy has in it."""
    names = []
    for file in files:
        whole = [folder for folder in file.parents if holds_only(folder, files, all_files)]
        name = f"{whole[-1]}/" if whole else str(file)
        if name not in names:
            names.append(name)
    return names


def holds_only(folder: Path, files: list[Path], all_files: list[Path]) -> bool:
    """Returns whether none of the copy's files in a folder are others than these."""
    return all(file in files for file in all_files if folder in file.parents)


def left_out_table(copy: Copy) -> list[str]:
    """Returns a table of what `make copy` would bring besides."""
    table = ["| `make copy …` | brings |", "|---|---|"]
    for given in copy.left_out:
        table.append(f"| `{given}` | {optional.gives(given)} |")
    return table
