"""Copies a training script with exactly the files that it needs: `make copy MODEL=resnet50
TO=../mine`.

The files are those that the script imports, directly or through others, and those of the parts in
optional.py that this model, this device and WITH= ask for; of the encoders the record of this one.
What is written for a copy besides, its README and its test, is of copied/.
Only the standard library is needed.
"""

import argparse
import ast
import functools
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import optional
from copied import readme, tests

ROOT = Path(__file__).resolve().parent
# What a script may import of this repository.
PACKAGES = ("errors", "optional", "train", "models", "data")
ENCODERS = optional.ENCODERS
# Of the encoders: those with a script of their own, and GLUE's.
SCRIPTS_OF_TASKS = {
    task: module.removeprefix("train.") for task, module in optional.SCRIPTS_OF_TASKS.items()
}
GLUE_TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")
TASKS = (*SCRIPTS_OF_TASKS, *GLUE_TASKS)
SCRIPTS = {
    "resnet50": "resnet50",
    "dlrm": "dlrm",
    "transformer": "transformer",
    **dict.fromkeys(ENCODERS, "glue"),
}
CHOOSES_MODEL = ("glue", *SCRIPTS_OF_TASKS.values())  # by --model
# Scripts whose exports `make predict` does not take, and why.
PREDICTS_NOTHING = {
    "transformer": "its train/translate.py translates",
    "pretrain": "a model is fine-tuned before it predicts; leave out TASK=pretrain",
}
DEVICES = optional.names("DEVICE")
EXTRAS = optional.names("WITH")
# What each copy gets of the project where it is there: by what terms, and how to cite it.
TERMS = ("LICENSE", "NOTICE", "CITATION.cff")
# Distributions that are not named as what is imported from them.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "torch.utils.tensorboard": "tensorboard",
}
# What a package needs to read a user's data.
ALONG = {"fsspec": ["gcsfs"], "datasets": ["pyarrow"]}


@functools.cache  # a file is asked for again for each part that a copy may go without
def imported(source: str) -> frozenset[str]:
    """Returns the dotted names that the text of a file imports, anywhere in it. `from a import b`
    gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def module_file(module: str, root: Path) -> Path:
    """Returns the file of a module of this repository, there or not."""
    path = root / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def objective(record: str) -> set[str]:
    """Returns the module that the record of an encoder, as the text of its file, names as its
    `objective`. Only pretraining imports it."""
    names = set()
    for node in ast.walk(ast.parse(record)):
        if isinstance(node, ast.keyword) and node.arg == "objective":
            names.add(ast.literal_eval(node.value))
    return names


def modules_of(part: optional.Part, root: Path) -> set[str]:
    """Returns the modules of a part that a copy with this part gets, whoever imports them."""
    if not part.whole:
        return {part.loaded()}
    modules = set(part.modules)
    for module in part.modules:
        for file in (root / module.replace(".", "/")).glob("*.py"):
            modules.add(f"{module}.{file.stem}")
    return modules


def needed(
    script: str, model: str, device: str = "", extras: Sequence[str] = (), root: Path = ROOT
) -> tuple[list[Path], set[str]]:
    """Returns the files that a script needs for a model on a device ("": on all), relative to
    `root`, and the other modules that they import."""
    devices = [device] if device else DEVICES
    given = {f"MODEL={model}", f"SCRIPT={script}"}
    given.update(f"DEVICE={name}" for name in devices)
    given.update(f"WITH={name}" for name in extras)
    parts = optional.in_copy(given)
    left_out = [part for part in optional.PARTS if part not in parts]

    found: set[Path] = set()
    others: set[str] = set()
    waiting = {f"train.{script}"}
    for part in parts:
        waiting |= modules_of(part, root)
    while waiting:
        name = waiting.pop()
        if any(part.has(name) for part in left_out):
            continue
        if name.split(".")[0] not in PACKAGES:
            others.add(name)
            continue

        path = module_file(name, root)
        file = path.relative_to(root)
        if file in found or not path.exists():  # a name in a module is no file
            continue
        found.add(file)
        source = path.read_text()
        waiting |= imported(source)
        if script == "pretrain" and name in ENCODERS.values():
            waiting |= objective(source)
        package = name.rpartition(".")[0]
        if package:
            waiting.add(package)  # its own __init__.py
    return sorted(found), others


def requirements(
    modules: set[str], root: Path = ROOT, device: str = ""
) -> tuple[list[str], list[str]]:
    """Returns the lines of requirements.txt, and those of requirements-torchrec.txt, that these
    modules need on a device ("": on all)."""
    wanted = set()
    for name in modules:
        package = name.split(".")[0]
        distribution = DISTRIBUTIONS.get(name, DISTRIBUTIONS.get(package, package))
        wanted.add(distribution)
        wanted.update(ALONG.get(distribution, []))

    lines = (root / "requirements.txt").read_text().splitlines()
    if device == "tpu":  # TorchTPU, and a torch for it
        lines = [line for line in lines if not line.startswith("torch")]
        for name in ("requirements-newest.txt", "requirements-torch-tpu.txt"):
            lines += (root / name).read_text().splitlines()
        wanted.update(("torch-tpu", "libtpu"))
    plain = [line for line in lines if line.split("==")[0] in wanted]
    torchrec = []
    if "torchrec" in wanted:
        torchrec = (root / "requirements-torchrec.txt").read_text().splitlines()
    return plain, torchrec


def removable(
    script: str, model: str, device: str, extras: Sequence[str], root: Path = ROOT
) -> list[readme.Removable]:
    """Returns what of a copy is there for one of its devices or for one of WITH= alone."""
    files, modules = needed(script, model, device, extras, root)
    smaller = {}  # argument of `make copy` -> what a copy without it needs
    if not device:
        smaller["DEVICE=xla"] = needed(script, model, "tpu", extras, root)  # all the others
        smaller["DEVICE=cpu"] = needed(script, model, "xla", extras, root)
    for name in extras:
        others = [other for other in extras if other != name]
        smaller[f"WITH={name}"] = needed(script, model, device, others, root)

    found = []
    for given, (left, left_modules) in smaller.items():
        lines = requirements(modules, root, device)[0]
        left_lines = requirements(left_modules, root, device)[0]
        names = [line.split("==")[0] for line in lines if line not in left_lines]
        only_its_own = [file for file in files if file not in left]
        if only_its_own:
            found.append(readme.Removable(given, only_its_own, names))
    return found


def left_out(script: str, device: str, extras: Sequence[str]) -> list[str]:
    """Returns the arguments that would bring more to a copy of this script."""
    arguments = []
    if device:
        arguments.append("DEVICE=cpu" if device == "xla" else "DEVICE=xla")
    arguments += [f"WITH={name}" for name in EXTRAS if name not in extras]
    return [argument for argument in arguments if optional.of_use(argument, script)]


def write(copy: readme.Copy, to: Path, plain: list[str], torchrec: list[str]) -> None:
    """Writes a copy into a folder."""
    for file in copy.files:
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(copy.root / file, to / file)
    (to / "requirements.txt").write_text("\n".join(plain) + "\n")
    if torchrec:
        (to / "requirements-torchrec.txt").write_text("\n".join(torchrec) + "\n")

    for name in copy.terms:
        shutil.copyfile(copy.root / name, to / name)
    (to / "README.md").write_text(readme.readme(copy))
    for name in ("Makefile", "pytest.ini"):
        shutil.copyfile(copy.root / "copied" / name, to / name)
    (to / "tests").mkdir()
    test = tests.source(copy.script, copy.model, copy.device)
    (to / "tests" / f"test_{copy.script}.py").write_text(test)


def copy(
    model: str, task: str, to: Path, device: str = "", extras: Sequence[str] = (), root: Path = ROOT
) -> list[Path]:
    """Writes the copy; returns its files. Exits with a sentence where that cannot be done."""
    if model not in SCRIPTS:
        sys.exit(f"error: MODEL={model} is not known; MODEL is one of: {' '.join(SCRIPTS)}")
    if task and (model not in ENCODERS or task not in TASKS):
        sys.exit(
            f"error: TASK={task} is not one of MODEL={model}; "
            f"the encoders have {' '.join(TASKS)}, others none"
        )
    if device and device not in DEVICES:
        sys.exit(
            f"error: DEVICE={device} is not known; "
            f"DEVICE is one of: {' '.join(DEVICES)}, or left out for all"
        )
    if device == "tpu" and model == "dlrm":
        sys.exit(
            "error: MODEL=dlrm is not for DEVICE=tpu: torchrec, which it needs, has no release for "
            "the torch of TorchTPU; leave out DEVICE=tpu"
        )
    for name in extras:
        if name not in EXTRAS:
            known = " ".join(EXTRAS)
            sys.exit(f"error: WITH={name} is not known; WITH is one or several of: {known}")
    script = SCRIPTS_OF_TASKS.get(task, SCRIPTS[model])
    if "predict" in extras and script in PREDICTS_NOTHING:
        sys.exit(f"error: WITH=predict is not for this copy: {PREDICTS_NOTHING[script]}")
    if script == "pretrain" and model not in optional.PRETRAINED:
        known = " ".join(optional.PRETRAINED)
        sys.exit(f"error: MODEL={model} is for fine-tuning; TASK=pretrain needs one of: {known}")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        sys.exit(f"error: TO={to} is there and not an empty folder; give another, or empty it")

    files, modules = needed(script, model, device, extras, root)
    plain, torchrec = requirements({*modules, "pytest"}, root, device)
    made = readme.Copy(
        script=script,
        model=model if script in CHOOSES_MODEL else "",
        device=device,
        files=files,
        root=root,
        torchrec=bool(torchrec),
        removable=removable(script, model, device, extras, root),
        left_out=left_out(script, device, extras),
        terms=[name for name in TERMS if (root / name).exists()],
    )
    try:
        write(made, to, plain, torchrec)
    except OSError as error:
        reason = error.strerror or error
        sys.exit(
            f"error: cannot write to TO={to}: {reason}; make room or access, and empty it first"
        )
    return files


def main() -> None:
    """Runs the command line of `make copy`."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    add = parser.add_argument
    add("model", help=" ".join(SCRIPTS))
    add(
        "--task",
        default="",
        help=f"one with a script of its own: {' '.join(SCRIPTS_OF_TASKS)}; or one of GLUE",
    )
    add("--device", default="", help="only for xla, cpu, cuda or tpu; left out: for all")
    add("--with", dest="extras", default="", help=f"what it can do without: {' '.join(EXTRAS)}")
    add("--to", required=True, help="a new or empty folder")
    options = parser.parse_args()
    if "://" in options.to:
        sys.exit(f"error: TO={options.to} is a URL; give a folder of this machine")
    to = Path(options.to).expanduser()
    files = copy(options.model, options.task, to, options.device, options.extras.split())
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    count = sum((ROOT / file).stat().st_size > 0 for file in files)
    print(f"{options.to}: {count} files, {lines:,} lines; README.md says how to run it")


if __name__ == "__main__":
    main()
