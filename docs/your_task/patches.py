"""The examples of docs/your_task.md: each a patch for a fresh copy of a script.

    python -m docs.your_task.patches                       writes all anew, on the scripts of today
    python -m docs.your_task.patches similarity ../mine    writes one from a copy that was edited

Where a script has changed just where a patch does, the first command names the rejected parts:
apply the patch to a copy, edit what was rejected, give the second.
"""

import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

import copy_model

FOLDER = Path(__file__).parent
# An example -> the model whose copy it changes.
MODELS = {"mobilenet": "resnet50", "similarity": "bert"}


def patch_of(name: str) -> Path:
    """Returns the file of an example."""
    return FOLDER / f"{name}.patch"


def make_copy(name: str, folder: Path, device: str = "") -> None:
    """Makes the copy that an example changes."""
    copy_model.copy(MODELS[name], "", folder, device)


def apply(name: str, folder: Path) -> str:
    """Applies an example to a copy; returns what `patch` says of parts that do not fit, or ""."""
    command = ["patch", "-p1", "--batch", "--no-backup-if-mismatch"]
    with open(patch_of(name)) as patch:
        result = subprocess.run(
            command, cwd=folder, stdin=patch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    return result.stdout.decode() if result.returncode else ""


def difference(before: Path, after: Path) -> str:
    """Returns the patch that makes the Python files of one copy those of another."""
    names = set()
    for folder in (before, after):
        for package in ("data", "models", "tests", "train"):
            names |= {path.relative_to(folder) for path in folder.glob(f"{package}/**/*.py")}

    lines = []
    for name in sorted(names):
        old = lines_of(before / name)
        new = lines_of(after / name)
        old_name = f"a/{name}" if old else "/dev/null"
        new_name = f"b/{name}" if new else "/dev/null"
        lines += difflib.unified_diff(old, new, old_name, new_name)
    return "".join(lines)


def lines_of(path: Path) -> list[str]:
    """Returns the lines of a file; none where it is not there."""
    return path.read_text().splitlines(keepends=True) if path.is_file() else []


def changed_lines(name: str) -> tuple[int, int]:
    """Returns how many lines an example adds, and how many it takes away."""
    added = 0
    removed = 0
    for line in patch_of(name).read_text().splitlines():
        if line.startswith("+") and not line.startswith("+++ "):
            added += 1
        if line.startswith("-") and not line.startswith("--- "):
            removed += 1
    return added, removed


def renew(name: str) -> None:
    """Writes a patch anew from the copy that it changes today."""
    with tempfile.TemporaryDirectory() as scratch:
        before = Path(scratch, "before")
        after = Path(scratch, "after")
        for folder in (before, after):
            make_copy(name, folder)
        rejected = apply(name, after)
        if rejected:
            sys.exit(f"error: {patch_of(name).name} no longer fits its copy:\n{rejected}")
        patch_of(name).write_text(difference(before, after))


def save(name: str, edited: Path) -> None:
    """Writes the patch that makes a fresh copy what an edited one is."""
    with tempfile.TemporaryDirectory() as scratch:
        before = Path(scratch, "before")
        make_copy(name, before)
        patch_of(name).write_text(difference(before, edited))


def main(arguments: list[str]) -> None:
    """Runs one of the two command lines above."""
    if not arguments:
        for name in MODELS:
            renew(name)
        return
    if len(arguments) != 2 or arguments[0] not in MODELS:
        sys.exit(f"error: expected nothing, or an example ({', '.join(MODELS)}) and a folder")
    save(arguments[0], Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
