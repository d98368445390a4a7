"""Copies a training script with exactly the files that it needs: `make copy MODEL=resnet50 TO=../mine`.

The files are those that the script imports, directly or through others, and those of the parts in optional.py that this
model, this device and WITH= ask for; of the encoders the record of this one. Only the standard library is needed.
"""

import argparse
import ast
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import optional

ROOT = Path(__file__).resolve().parent
PACKAGES = ("errors", "optional", "train", "models", "data")  # what a script may import of this repository
ENCODERS = optional.ENCODERS
TASKS = ("pretrain", "cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")  # of the encoders
SCRIPTS = {"resnet50": "resnet50", "dlrm": "dlrm", "transformer": "transformer"} | dict.fromkeys(ENCODERS, "glue")
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "torch.utils.tensorboard": "tensorboard"}
DEVICES = optional.names("DEVICE")
EXTRAS = optional.names("WITH")
ALONG = {"fsspec": ["gcsfs"], "datasets": ["pyarrow"]}  # what a package needs for the sake of a user's data


def imported(tree: ast.Module) -> set[str]:
    """Returns the dotted names that a file imports, anywhere in it; `from a import b` gives both a and a.b."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def module_file(module: str, root: Path) -> Path:
    """Returns the file of a module of this repository, there or not."""
    path = root / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def objective(record: ast.Module) -> set[str]:
    """Returns the module that the record of an encoder names as its `objective`; only pretraining imports it."""
    names = set()
    for node in ast.walk(record):
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


def way(
    script: str, model: str, device: str = "", extras: Sequence[str] = (), root: Path = ROOT
) -> tuple[list[Path], set[str]]:
    """Returns the files that a script needs for a model on a device ("": on all), relative to `root`, and the other
    modules that they import."""
    given = {f"MODEL={model}"}
    given.update(f"DEVICE={name}" for name in ([device] if device else DEVICES))
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
        tree = ast.parse(path.read_text())
        waiting |= imported(tree)
        if script == "pretrain" and name in ENCODERS.values():
            waiting |= objective(tree)
        package = name.rpartition(".")[0]
        if package:
            waiting.add(package)  # its own __init__.py
    return sorted(found), others


def requirements(modules: set[str], root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Returns the lines of requirements.txt, and those of requirements-torchrec.txt, that these modules need."""
    wanted = {DISTRIBUTIONS.get(name) or DISTRIBUTIONS.get(name.split(".")[0], name.split(".")[0]) for name in modules}
    wanted |= {other for name in wanted & ALONG.keys() for other in ALONG[name]}
    lines = (root / "requirements.txt").read_text().splitlines()
    plain = [line for line in lines if re.split("==", line)[0] in wanted]
    torchrec = (root / "requirements-torchrec.txt").read_text().splitlines() if "torchrec" in wanted else []
    return plain, torchrec


def readme(script: str, model: str, device: str, files: list[Path], torchrec: bool) -> str:
    """Returns the README of a copy: how to install it, how to run it, what is in it."""
    pins = (ROOT / "requirements-tpu.txt").read_text().splitlines()
    libtpu = next(line.split()[0] for line in pins if not line.startswith("#"))
    choice = f" --model {model}" if script in ("glue", "pretrain") else ""
    choice += f" --device {device}" if device not in ("", "xla") else ""
    install = "pip install -r requirements.txt"
    install += " && pip install --no-deps -r requirements-torchrec.txt" if torchrec else ""
    listed = ", ".join(str(file) for file in files if file.name != "__init__.py")
    return "\n".join(
        [
            f"# train/{script}.py{choice}, a copy of the XLA model zoo's",
            "",
            f"    python3.11 -m venv .venv && . .venv/bin/activate && {install}",
            f"    python -m train.{script} tiny{choice}      # a trial on synthetic data",
            f"    python -m train.{script} tiny --help          # all flags",
            "",
            "torch_xla is linked to libpython: on Debian and Ubuntu `sudo apt-get install -y libpython3.11`.\n"
            f"On a TPU VM: `pip install {libtpu}`, then a preset with `--data`. `make data` is in the repository."
            if device in ("", "xla")
            else "For TPUs: copy it with DEVICE=xla. `make data` is in the repository.",
            f"Files: {listed}.",
            "Change train/ and models/ as you like; train/common/run.py says which order of a step's end must stay.",
            "Files of docs/ and tests/ that comments and messages name are in the repository, not here.",
            "",
        ]
    )


def copy(
    model: str, task: str, to: Path, device: str = "", extras: Sequence[str] = (), root: Path = ROOT
) -> list[Path]:
    """Writes the copy; returns its files. Exits with a sentence where that cannot be done."""
    if model not in SCRIPTS:
        sys.exit(f"error: MODEL={model} is not known; MODEL is one of: {' '.join(SCRIPTS)}")
    if task and (model not in ENCODERS or task not in TASKS):
        sys.exit(f"error: TASK={task} is not one of MODEL={model}; the encoders have {' '.join(TASKS)}, others none")
    if device and device not in DEVICES:
        sys.exit(f"error: DEVICE={device} is not known; DEVICE is one of: {' '.join(DEVICES)}, or left out for all")
    if unknown := [name for name in extras if name not in EXTRAS]:
        sys.exit(f"error: WITH={unknown[0]} is not known; WITH is one or several of: {' '.join(EXTRAS)}")
    script = "pretrain" if task == "pretrain" else SCRIPTS[model]
    if script == "pretrain" and model not in optional.PRETRAINED:
        known = " ".join(optional.PRETRAINED)
        sys.exit(f"error: MODEL={model} is for fine-tuning; TASK=pretrain needs one of: {known}")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        sys.exit(f"error: TO={to} is there and not an empty folder; give another, or empty it")
    files, modules = way(script, model, device, extras, root)
    plain, torchrec = requirements(modules, root)
    try:
        for file in files:
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, to / file)
        (to / "requirements.txt").write_text("\n".join(plain) + "\n")
        if torchrec:
            (to / "requirements-torchrec.txt").write_text("\n".join(torchrec) + "\n")
        (to / "README.md").write_text(readme(script, model, device, files, bool(torchrec)))
    except OSError as error:
        sys.exit(f"error: cannot write to TO={to}: {error.strerror or error}; make room or access, and empty it first")
    return files


def main() -> None:
    """Runs the command line of `make copy`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=" ".join(SCRIPTS))
    parser.add_argument("--task", default="", help="pretrain: train/pretrain.py instead of train/glue.py")
    parser.add_argument("--device", default="", help="only for xla, cpu or cuda; left out: for all three")
    parser.add_argument("--with", dest="extras", default="", help=f"what it can do without: {' '.join(EXTRAS)}")
    parser.add_argument("--to", required=True, help="a new or empty folder")
    options = parser.parse_args()
    if "://" in options.to:
        sys.exit(f"error: TO={options.to} is a URL; give a folder of this machine")
    files = copy(options.model, options.task, Path(options.to).expanduser(), options.device, options.extras.split())
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    count = sum((ROOT / file).stat().st_size > 0 for file in files)
    print(f"{options.to}: {count} files, {lines:,} lines; README.md says how to run it")


if __name__ == "__main__":
    main()
