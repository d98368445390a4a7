"""copy_model.py: a copy of a script has exactly the files that it needs, and trains where it lies."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_repository import make

import copy_model
from models import encoders

TEXT = "--epochs 0.1 --eval-every 1000 --lengths 32"
ENCODERS = ("bert", "distilbert", "roberta", "xlnet", "fairseq-roberta")
OF_TEXT = ["auto", *ENCODERS, *(f"{model} pretrain" for model in ENCODERS)]
COPIES = ["resnet50", "dlrm", "transformer", *OF_TEXT]
# What is not of every copy: file or package -> the copies that have it.
OF_MODELS = {
    "models/resnet.py": {"resnet50"},
    "models/dlrm.py": {"dlrm"},
    "train/common/embedding/bags.py": {"dlrm"},
    "models/transformer.py": {"transformer"},
    "train/translate.py": {"transformer"},
    "models/encoders/xlnet.py": {"xlnet", "xlnet pretrain"},
    "models/encoders/fairseq_roberta.py": {"fairseq-roberta", "fairseq-roberta pretrain"},
    "models/encoders/auto.py": {"auto"},
    "models/two_streams.py": {"xlnet", "xlnet pretrain"},
    "models/permutation.py": {"xlnet pretrain"},
    "models/distillation.py": {"distilbert pretrain"},
    "models/fairseq_folders.py": {"fairseq-roberta", "fairseq-roberta pretrain"},
    "tpu/compiler/staging.py": set(),
    "train/common/watch/__init__.py": set(),
    "train/common/sharding/__init__.py": set(),
    "train/common/xla/recompute.py": set(),
    "torchvision": {"resnet50"},
    "torchrec": {"dlrm"},
    "transformers": {*OF_TEXT},
    "datasets": {"auto", *ENCODERS},
}
TRIALS = {
    "resnet50": "--epochs 1 --warmup-epochs 0.5 --batch-size 512",
    "dlrm": "--batch-size 4096",
    "transformer": "--updates 2 --eval-every 2 --save-every 2",
}


# Runs command lines of a script in one process, each as `python -m` does.
COMMANDS = """
import runpy, shlex, sys
script, *lines = sys.argv[1:]
for line in lines:
    sys.argv = [script, *shlex.split(line)]
    try:
        runpy.run_module(script, run_name="__main__")
    except SystemExit as stopped:
        print("exit code", stopped.code, file=sys.stderr)
"""


def copied(what: str, to: Path, **options) -> set[str]:
    model, _, task = what.partition(" ")
    return set(map(str, copy_model.copy(model, task, to, **options)))


def train(folder: Path, script: str, *lines: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs command lines of a copy, with the small preset."""
    hidden = {"PYTHONPATH", "CPU_NUM_DEVICES"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | variables
    command = [sys.executable, "-c", COMMANDS, f"train.{script}", *(f"tiny --name trial {line}" for line in lines)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return result


@pytest.mark.parametrize("what", COPIES)
def test_a_copy_has_its_own_files_and_no_other_models(what, tmp_path):
    files, packages = copied(what, tmp_path / "mine"), set()
    for path in (tmp_path / "mine").glob("requirements*.txt"):
        packages |= {line.partition("==")[0] for line in path.read_text().splitlines()}
    for name, copies in OF_MODELS.items():
        assert (name in files | packages) == (what in copies), name
    assert {"errors.py", "train/common/run.py"} <= files and {"torch_xla", "gcsfs", "tensorboard"} <= packages
    assert not [file for file in files if file.startswith(("tests", "bench", "tpu"))]
    written = (tmp_path / "mine/README.md").read_text()
    assert [file for file in files if "__init__" not in file and file not in written] == []


@pytest.mark.parametrize(
    "what", [copy if copy == "bert" else pytest.param(copy, marks=pytest.mark.slow) for copy in COPIES]
)
def test_a_copy_trains_in_an_empty_folder(what, tmp_path):
    model, _, task = what.partition(" ")
    result = make("copy", f"MODEL={model}", f"TO={tmp_path}/mine", *([f"TASK={task}"] if task else []))
    assert result.returncode == 0, result.stderr
    script = "pretrain" if task else copy_model.SCRIPTS[model]
    trial = TRIALS.get(model, "--steps 2 --eval-every 2" if task else TEXT)
    train(tmp_path / "mine", script, f"{trial} --model {model}" if script in ("glue", "pretrain") else trial)
    summary = json.loads((tmp_path / "mine/runs/trial/summary.json").read_text())
    assert summary["report"]["recompilations"] == summary["report"]["fallbacks"] == []
    assert any((tmp_path / "mine/runs/trial/export").iterdir())


@pytest.mark.parametrize(("device", "other"), [("cpu", "xla"), pytest.param("xla", "cpu", marks=pytest.mark.slow)])
def test_a_copy_for_one_kind_of_device_leaves_out_the_other_and_trains(tmp_path, device, other):
    copied("dlrm", tmp_path, device=device, extras=("watch",))
    assert ("torch_xla==" in (tmp_path / "requirements.txt").read_text()) == (device == "xla")
    written = (tmp_path / "README.md").read_text()
    assert ("--device cpu" in written) == (device == "cpu")
    assert ("apt-get install -y libpython3.11" in written) == (device == "xla")
    lines = [f"{TRIALS['dlrm']} --device {kind}" for kind in (other, device)]
    result = train(tmp_path, "dlrm", *lines, CPU_NUM_DEVICES="1")
    assert re.search(rf"error: --device is {other}, .*copy with DEVICE={other}.*\nexit code 2\n", result.stderr)
    assert "auc" in result.stdout, result.stderr


def test_a_copy_brings_what_it_can_do_without_or_says_how_to_get_it(tmp_path):
    copied("resnet50", tmp_path / "plain")
    files = copied("resnet50", tmp_path / "full", extras=("watch", "sharding", "hub_images"))
    watchers = {str(path.relative_to(copy_model.ROOT)) for path in copy_model.ROOT.glob("train/common/watch/*.py")}
    assert {*watchers, "data/hub_images.py", "train/common/xla/pin_sharding.py"} <= files
    assert "\ndatasets==" in (tmp_path / "full/requirements.txt").read_text()
    data = "--data uoft-cs/cifar10"
    refused = train(tmp_path / "plain", "resnet50", "--shard-state full", data).stderr
    assert re.search("error: .*--shard-state or --remat needs train.common.sharding.*WITH=sharding", refused), refused
    assert re.search("error: .*cifar10 needs data.hub_images.*make copy … WITH=hub_images.*\nexit code 2", refused)
    flags = f"{data} --stall-after 30 --shard-state full"  # of hub_images, watch and sharding
    refused = train(tmp_path / "full", "resnet50", flags, HF_HUB_OFFLINE="1").stderr
    assert re.search("cifar10 is neither a folder nor a data set of the hub.*\nexit code 2", refused), refused


# The record of an encoder that the project does not have, and its line.
LINE = '    "electra": "models.encoders.electra",\n'
ELECTRA = '''"""ELECTRA (Clark et al. 2020, arXiv:2003.10555)."""

from transformers import ElectraConfig

from models.encoders.record import Cuts, Encoder, FineTuning, LanguageHead, Pretraining
from models.partition import IN, OUT, VECTOR


def configuration(size, tokenizer, max_tokens):
    return ElectraConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        embedding_size=size.width,
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=max_tokens,
    )


def words(model, hidden):
    return model.generator_lm_head(model.generator_predictions(hidden))


ENCODER = Encoder(
    architecture="electra",
    tokenizer="bert",
    published=ElectraConfig(),
    configuration=configuration,
    cuts=Cuts(
        parameters={
            r"attention\\.self\\.(query|key|value)\\.weight": OUT,
            r"attention\\.self\\.(query|key|value)\\.bias": VECTOR,
            r"attention\\.output\\.dense\\.weight": IN,
            r"intermediate\\.dense\\.weight": OUT,
            r"intermediate\\.dense\\.bias": VECTOR,
            r"\\d+\\.output\\.dense\\.weight": IN,
            r"word_embeddings\\.weight": OUT,
        },
        layers="electra.encoder.layer",
        shared=r"attention\\.self$",
    ),
    head=LanguageHead("generator_lm_head", {r"generator_lm_head\\.bias": VECTOR}, words),
    fine_tuning=FineTuning(
        source="made up",
        checkpoint="google/electra-base-discriminator",
        lr=1e-4,
        warmup=0.1,
        weight_decay=0.01,
        epochs=3,
    ),
    objective="models.masked_words",
    pretraining=Pretraining(
        source="made up",
        batch_size=256,
        steps=1_000_000,
        lr=2e-4,
        warmup_steps=10_000,
        weight_decay=0.01,
        beta2=0.999,
        clip=1.0,
    ),
    token_types=True,
    packed_layers="encoder",
)
'''


@pytest.fixture(scope="module")
def with_electra(tmp_path_factory) -> Path:
    """Returns the project with one encoder more: a file, and a line."""
    root = tmp_path_factory.mktemp("project")
    for name in ("train", "models", "data"):
        shutil.copytree(copy_model.ROOT / name, root / name)
    for name in ("errors.py", "optional.py", "copy_model.py", "Makefile"):
        shutil.copy(copy_model.ROOT / name, root)
    for path in copy_model.ROOT.glob("requirements*.txt"):
        shutil.copy(path, root)

    (root / "models/encoders/electra.py").write_text(ELECTRA)
    table = root / "optional.py"
    text = table.read_text()
    last = '    "auto": '
    assert text.count(last) == 1
    table.write_text(text.replace(last, LINE + last))
    return root


@pytest.mark.parametrize(
    ("task", "flags"),
    [
        ("", f"{TEXT} --mesh data=2,model=2"),
        pytest.param("pretrain", "--steps 2 --eval-every 2", marks=pytest.mark.slow),
    ],
)
def test_a_new_encoder_is_one_file_and_one_line(task, flags, with_electra, tmp_path):
    """It is copied, and its copy trains, layers cut over devices included."""
    given = ["MODEL=electra", f"TASK={task}", f"TO={tmp_path}/mine", "WITH=sharding"]
    result = make("copy", "-C", str(with_electra), *given)
    assert result.returncode == 0, result.stderr
    files = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*.py")}
    assert "models/encoders/electra.py" in files and "models/encoders/bert.py" not in files
    assert ("models/masked_words.py" in files) == (task == "pretrain")

    train(tmp_path / "mine", task or "glue", f"{flags} --model electra", CPU_NUM_DEVICES="4")
    run = tmp_path / "mine/runs/trial"
    assert json.loads((run / "summary.json").read_text())["report"]["recompilations"] == []
    assert json.loads((run / "export/config.json").read_text())["model_type"] == "electra"


def test_make_copy_and_the_scripts_know_the_same_encoders():
    assert list(copy_model.ENCODERS) == list(encoders.NAMES)
    known = re.search(r"^MODEL    one of: (.*)$", make("help").stdout, re.MULTILINE)[1].split()
    assert known[-len(encoders.NAMES) :] == list(encoders.NAMES)


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
    }
    for arguments, sentence in cases.items():
        result = make("copy", *arguments)
        assert result.returncode != 0 and re.search(sentence, result.stderr), (arguments, result.stderr)
    assert (full / "notes.txt").read_text() == "mine" and not (tmp_path / "new").exists()
