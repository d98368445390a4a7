"""copy_model.py: a copy of a script has exactly the files that it needs, and trains where it lies."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_repository import make

import copy_model

TEXT = "--epochs 0.1 --eval-every 1000 --lengths 32"
# What is not of every copy: file -> the copies that have it.
OF_MODELS = {
    "models/resnet.py": {"resnet50"},
    "models/dlrm.py": {"dlrm"},
    "train/common/embedding/bags.py": {"dlrm"},
    "models/transformer.py": {"transformer"},
    "train/translate.py": {"transformer"},
    "models/xlnet.py": {"xlnet", "xlnet pretrain"},
    "models/permutation.py": {"xlnet pretrain"},
    "models/distilbert.py": {"distilbert pretrain"},
    "models/fairseq_roberta.py": {"fairseq-roberta", "fairseq-roberta pretrain"},
    "train/common/xla/staging.py": set(),
    "train/common/watch/__init__.py": set(),
    "train/common/sharding/__init__.py": set(),
    "train/common/xla/recompute.py": set(),
}
ENCODERS = ("bert", "distilbert", "roberta", "xlnet", "fairseq-roberta")
COPIES = ["resnet50", "dlrm", "transformer", "auto", *ENCODERS, *(f"{model} pretrain" for model in ENCODERS)]
TRIALS = {
    "resnet50": "--epochs 1 --warmup-epochs 0.5 --batch-size 512",
    "dlrm": "--batch-size 4096",
    "transformer": "--updates 2 --eval-every 2 --save-every 2",
}


def copied(what: str, to: Path) -> list[str]:
    model, _, task = what.partition(" ")
    result = make("copy", f"MODEL={model}", f"TO={to}", *([f"TASK={task}"] if task else []))
    assert result.returncode == 0, result.stderr
    return sorted(str(path.relative_to(to)) for path in to.rglob("*") if path.is_file())


def train(folder: Path, script: str, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    """Trains the small preset of a copy."""
    hidden = {"PYTHONPATH", "CPU_NUM_DEVICES"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | variables
    command = [sys.executable, "-m", f"train.{script}", "tiny", "--name", "trial", *flags]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("what", COPIES)
def test_a_copy_has_its_own_files_and_no_other_models(what, tmp_path):
    files = copied(what, tmp_path / "mine")
    for file, copies in OF_MODELS.items():
        assert (file in files) == (what in copies), file
    assert {"errors.py", "train/common/run.py", "requirements.txt", "README.md"} <= set(files)
    assert not [file for file in files if file.startswith(("tests", "bench", "tpu"))]
    written = (tmp_path / "mine/README.md").read_text()
    assert len(written.splitlines()) <= 10
    missing = [file for file in files if file.endswith(".py") and "__init__" not in file and file not in written]
    assert missing == []


@pytest.mark.parametrize(
    "what", [copy if copy in ("resnet50", "bert") else pytest.param(copy, marks=pytest.mark.slow) for copy in COPIES]
)
def test_a_copy_trains_in_an_empty_folder(what, tmp_path):
    copied(what, tmp_path / "mine")
    model, _, task = what.partition(" ")
    script = "pretrain" if task else copy_model.SCRIPTS[model]
    trial = TRIALS.get(model, "--steps 2 --eval-every 2" if task else TEXT).split()
    trial += ["--model", model] if script in ("glue", "pretrain") else []
    result = train(tmp_path / "mine", script, *trial)
    assert result.returncode == 0, result.stderr[-2000:]
    summary = json.loads((tmp_path / "mine/runs/trial/summary.json").read_text())
    assert summary["report"]["recompilations"] == summary["report"]["fallbacks"] == []
    assert any((tmp_path / "mine/runs/trial/export").iterdir())


def test_a_copy_says_which_file_another_model_needs(tmp_path):
    copied("bert", tmp_path / "mine")
    result = train(tmp_path / "mine", "glue", "--model", "xlnet")
    assert result.returncode == 2
    assert "--model xlnet needs models.xlnet" in result.stderr and "make copy … MODEL=xlnet" in result.stderr
    result = train(tmp_path / "mine", "glue", "--remat")
    assert result.returncode == 2 and re.search("or --remat needs train.common.sharding.*WITH=sharding", result.stderr)


def test_a_copy_requires_what_its_files_import(tmp_path):
    copied("resnet50", tmp_path / "images")
    copied("dlrm", tmp_path / "clicks")
    images, clicks = ((tmp_path / name / "requirements.txt").read_text() for name in ("images", "clicks"))
    assert "torchvision==" in images and "gcsfs==" in images and "tensorboard==" in images
    assert "transformers" not in images.replace("# ", "") and "torchvision==" not in clicks
    torchrec = (tmp_path / "clicks/requirements-torchrec.txt").read_text()
    assert "torchrec==" in torchrec and not (tmp_path / "images/requirements-torchrec.txt").exists()


def test_a_copy_for_one_kind_of_device_leaves_out_the_other(tmp_path):
    """Without torch_xla, or without eager.py, the trial runs."""
    for device, absent in (("cpu", "train/common/xla"), ("xla", "train/common/eager.py")):
        folder = tmp_path / device
        files = copy_model.copy("dlrm", "", folder, device, ("watch",))
        assert not any(str(file).startswith(absent) for file in files) and not (folder / absent).exists()
        assert ("torch_xla==" in (folder / "requirements.txt").read_text()) == (device == "xla")
    assert "--device cpu" in (tmp_path / "cpu/README.md").read_text()
    for copy, device in (("cpu", "cpu"), ("cpu", "xla"), ("xla", "cpu")):
        result = train(tmp_path / copy, "dlrm", "--device", device, *TRIALS["dlrm"].split(), CPU_NUM_DEVICES="1")
        if copy == device:
            assert result.returncode == 0 and "auc" in result.stdout, result.stderr[-2000:]
        else:
            assert result.returncode == 2 and re.search(f"error: --device is {device}, .*copy with", result.stderr)


def test_a_copy_brings_what_it_can_do_without(tmp_path):
    """WITH=watch has its flags; a copy without hub_images says how to get it."""
    copied("resnet50", tmp_path / "plain")
    data = ["--data", "uoft-cs/cifar10"]
    result = train(tmp_path / "plain", "resnet50", *data)
    assert result.returncode == 2 and "copy: make copy … WITH=hub_images brings it" in result.stderr, result.stderr
    files = copy_model.copy("resnet50", "", tmp_path / "full", "", ("watch", "sharding", "hub_images"))
    watchers = {path.relative_to(copy_model.ROOT) for path in copy_model.ROOT.glob("train/common/watch/*.py")}
    assert {*watchers, Path("data/hub_images.py"), Path("train/common/xla/marks.py")} <= set(files)
    assert "\ndatasets==" in (tmp_path / "full/requirements.txt").read_text()
    flags = [*data, "--stall-after", "30", "--shard-state", "full"]
    result = train(tmp_path / "full", "resnet50", *flags, HF_HUB_OFFLINE="1")
    assert result.returncode == 2 and "cifar10 is neither a folder nor a data set of the hub" in result.stderr


def test_refusals(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    cases = {
        ("MODEL=resnet50",): "TO is missing.*TO=../mine",
        ("MODEL=vgg", f"TO={tmp_path}/new"): "MODEL=vgg is not known.*resnet50",
        ("MODEL=resnet50", f"TO={full}"): "is there and not an empty folder",
        ("MODEL=resnet50", "DEVICE=gpu", f"TO={tmp_path}/new"): "DEVICE=gpu is not known.*xla cpu cuda",
        ("MODEL=auto", "TASK=pretrain", f"TO={tmp_path}/new"): "MODEL=auto is for fine-tuning",
        ("MODEL=bert", "TASK=pretain", f"TO={tmp_path}/new"): "TASK=pretain is not one of MODEL=bert.*pretrain",
        ("MODEL=dlrm", "TASK=pretrain", f"TO={tmp_path}/new"): "TASK=pretrain is not one of MODEL=dlrm",
        ("MODEL=resnet50", "WITH=watch board", f"TO={tmp_path}/new"): "WITH=board is not known.*watch sharding",
        ("MODEL=resnet50", "TO=gs://bucket/mine"): "TO=gs://bucket/mine is a URL",
        ("MODEL=resnet50", "TO=/proc/it's mine"): "cannot write to TO=/proc/it's mine",
        ("MODEL=resnet50", "TO=/proc/mine"): "cannot write to TO=/proc/mine",
    }
    for arguments, sentence in cases.items():
        result = make("copy", *arguments)
        assert result.returncode != 0 and re.search(sentence, result.stderr), (arguments, result.stderr)
    assert (full / "notes.txt").read_text() == "mine" and not (tmp_path / "new").exists()
