"""Makes tests/older_runs.tar.xz: an unfinished run of each script, as an older version left it.

From this folder's parent, with the version's commit (0076f32 is the first that is kept) and a
Python that has requirements.txt:

    git worktree add /tmp/older 0076f32
    (cd /tmp/older &&
     PYTHONPATH=.:tests python /path/to/tests/older_runs.py /path/to/tests/older_runs.tar.xz)

Each is a run to the end, cut back to what a kill after the checkpoint of the step in KEPT would
have left, without curves.png and tb/. So that the file stays small, matrices have three values
each: names, shapes, numbers and files are those that the older version wrote.
"""

import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

# The checkpoint step of each script's run.
KEPT = {"resnet50": 60, "dlrm": 3, "glue": 15, "transformer": 24, "pretrain": 8}
# Constants of train/dlrm.py in its run.
DLRM = {
    "SYNTHETIC_ROWS": (20, 50, 100, 400, 60, 60, 80, 300),
    "SYNTHETIC_TRAIN": 1024,
    "SYNTHETIC_EVAL": 256,
}


def simplify(name: str, tensor) -> None:
    """Gives a matrix three values, those of Adam's second moments one: weights that still can be
    trained."""
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return
    if name.endswith(("exp_avg_sq", "sum")):
        tensor.fill_(tensor.mean())
        return
    size = tensor.abs().mean()
    sign_or_zero = (tensor / (2 * size)).round().clamp(-1, 1)
    tensor.copy_(sign_or_zero * 2 * size)


def cut(run: Path, step: int) -> None:
    """Removes from the folder of a finished run what came after the checkpoint of a step, and makes
    that small."""
    for name in ("export", "tb"):
        shutil.rmtree(run / name, ignore_errors=True)
    for name in ("summary.json", "curves.png", "goodput.json", ".lock"):
        (run / name).unlink(missing_ok=True)
    kept = run / f"checkpoints/step_{step:08d}"
    for checkpoint in (run / "checkpoints").iterdir():
        if checkpoint != kept:
            shutil.rmtree(checkpoint)
    simplify_checkpoint(kept)


def simplify_checkpoint(folder: Path) -> None:
    """Simplifies the tensors of a checkpoint, and writes their new checksum."""
    import safetensors.torch

    state = folder / "state.safetensors"
    tensors = safetensors.torch.load_file(state)
    for name, tensor in tensors.items():
        simplify(name, tensor)
    content = safetensors.torch.save(tensors)
    state.write_bytes(content)

    complete = folder / "COMPLETE"
    checksums = json.loads(complete.read_text())
    checksums[state.name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    complete.write_text(json.dumps(checksums))


def add_files(archive: tarfile.TarFile, folder: Path, root: Path) -> None:
    """Adds the files below a folder by their paths below `root`, without times and owners."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            content = file.read_bytes()
            entry = tarfile.TarInfo(str(file.relative_to(root)))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def main(archive: str) -> None:
    """Trains with the version in the current folder, and writes the archive."""
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["CPU_NUM_DEVICES"] = "4"
    from trials import TRIALS

    configs = {name: trial.short for name, trial in TRIALS.items()}
    configs["glue"] = replace(configs["glue"], keep=2)
    configs["dlrm"] = replace(
        configs["dlrm"],
        bottom=(16, 4),
        top=(16, 1),
        warmup_steps=0,
        save_every=1,
    )
    for name, value in DLRM.items():
        setattr(TRIALS["dlrm"].script, name, value)

    with tempfile.TemporaryDirectory() as root, tarfile.open(archive, "w:xz", preset=9) as out:
        for name, step in KEPT.items():
            TRIALS[name].script.main(replace(configs[name], runs=root, name=name))
            run = Path(root, name)
            cut(run, step)
            add_files(out, run, Path(root))


if __name__ == "__main__":
    main(sys.argv[1])
