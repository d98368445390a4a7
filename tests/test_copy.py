"""copy_model.py: a copy of a script has exactly the files that it needs, and trains where it is."""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from copies import passed_tests
from predicting import command, write_classifier, write_lines, write_network, write_pictures
from run_make import make

import copy_model
import optional
from data import glue
from models import encoders

ENCODERS = ("bert", "distilbert", "roberta", "xlnet", "fairseq-roberta")
OF_TEXT = ["auto", *ENCODERS, *(f"{model} pretrain" for model in ENCODERS)]
ANSWERING = ["bert squad", "xlnet squad"]
OF_TEXT += [*ANSWERING, "bert ner"]
COPIES = ["resnet50", "dlrm", "transformer", *OF_TEXT]  # a model, and its task where it has two

# What is not of every copy: file or package -> the copies that have it.
OF_MODELS = {
    "models/resnet.py": {"resnet50"},
    "data/labelled_files.py": {"resnet50"},
    "models/dlrm.py": {"dlrm"},
    "train/common/embedding/bags.py": {"dlrm"},
    "models/transformer.py": {"transformer"},
    "train/translate.py": {"transformer"},
    "models/encoders/xlnet.py": {"xlnet", "xlnet pretrain", "xlnet squad"},
    "models/encoders/fairseq_roberta.py": {"fairseq-roberta", "fairseq-roberta pretrain"},
    "models/encoders/auto.py": {"auto"},
    "models/two_streams.py": {"xlnet", "xlnet pretrain", "xlnet squad"},
    "models/permutation.py": {"xlnet pretrain"},
    "models/distillation.py": {"distilbert pretrain"},
    "models/fairseq_folders.py": {"fairseq-roberta", "fairseq-roberta pretrain"},
    "models/question_answering.py": {*ANSWERING},
    "data/squad_answers.py": {*ANSWERING},
    "tpu/compiler/staging.py": set(),
    "train/common/watch/__init__.py": set(),
    "train/common/sharding/__init__.py": set(),
    "train/common/xla/recompute.py": set(),
    "torchvision": {"resnet50"},
    "torchrec": {"dlrm"},
    "transformers": {*OF_TEXT},
    "data/windows.py": {"bert ner"},
    "train/glue.py": {"auto", *ENCODERS},
    "datasets": {"auto", *ENCODERS, *ANSWERING, "bert ner"},
}

# Flags of a trial that is over soon.
TRIALS = {
    "resnet50": "--epochs 1 --warmup-epochs 0.5 --batch-size 512",
    "dlrm": "--batch-size 4096",
    "transformer": "--updates 2 --eval-every 2 --save-every 2",
}
FINE_TUNING = "--epochs 0.1 --eval-every 1000 --lengths 32"
PRETRAINING = "--steps 2 --eval-every 2"
SHORT = "--epochs 0.1 --eval-every 1000"
# Task with a script of its own -> the flags of a trial that is over soon.
OF_TASKS = {"pretrain": PRETRAINING, "squad": SHORT, "ner": SHORT}

# Runs command lines of a script in one process, each as `python -m` does.
COMMANDS = """
import runpy
import shlex
import sys

script, *lines = sys.argv[1:]
for line in lines:
    sys.argv = [script, *shlex.split(line)]
    try:
        runpy.run_module(script, run_name="__main__")
    except SystemExit as stopped:
        print("exit code", stopped.code, file=sys.stderr)
"""


def model_and_task(what: str) -> tuple[str, str]:
    """Returns the model and the task of one of COPIES; "": the model's usual task."""
    model, _, task = what.partition(" ")
    return model, task


def script_of(what: str) -> str:
    """Returns the script of one of COPIES."""
    model, task = model_and_task(what)
    return copy_model.SCRIPTS_OF_TASKS.get(task, copy_model.SCRIPTS[model])


def copied(what: str, to: Path, **options) -> set[str]:
    """Makes a copy; returns the names of its files."""
    model, task = model_and_task(what)
    return set(map(str, copy_model.copy(model, task, to, **options)))


@dataclass(frozen=True)
class Copy:
    """A copy that several tests read and none changes."""

    folder: Path
    files: set[str]

    @property
    def readme(self) -> str:
        return (self.folder / "README.md").read_text()


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> Callable[[str], Copy]:
    """usual("bert squad"): this copy without further options, made once."""

    @functools.cache
    def get(what: str) -> Copy:
        folder = tmp_path_factory.mktemp("copies") / "mine"
        return Copy(folder, copied(what, folder))

    return get


def train(folder: Path, script: str, *lines: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs command lines of a copy, with the small preset."""
    environment = dict(os.environ)
    for name in ("PYTHONPATH", "CPU_NUM_DEVICES"):
        environment.pop(name, None)
    environment |= variables

    trials = [f"tiny --name trial {line}" for line in lines]
    command = [sys.executable, "-c", COMMANDS, f"train.{script}", *trials]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return result


# ---- what is in a copy ---------------------------------------------------------------------------
@pytest.mark.parametrize("what", COPIES)
def test_a_copy_has_its_own_files_and_no_other_models(what, usual):
    files = usual(what).files

    packages = set()
    for path in usual(what).folder.glob("requirements*.txt"):
        packages |= {line.partition("==")[0] for line in path.read_text().splitlines()}
    for name, copies in OF_MODELS.items():
        assert (name in files | packages) == (what in copies), name
    assert {"errors.py", "train/common/run.py"} <= files
    assert {"torch_xla", "gcsfs", "tensorboard"} <= packages
    assert not [file for file in files if file.startswith(("tests", "bench", "tpu"))]


@pytest.mark.parametrize("what", COPIES)
def test_the_readme_of_a_copy_names_its_files(what, usual):
    copy = usual(what)
    modules = [file for file in copy.files if "__init__" not in file]
    assert [file for file in modules if file not in copy.readme] == []


@pytest.fixture
def project(tmp_path) -> Path:
    """The project's files by links, in a folder to which a test adds some."""
    root = tmp_path / "project"
    root.mkdir()
    names = ["train", "models", "data", "errors.py", "optional.py", "copied"]
    names += [path.name for path in copy_model.ROOT.glob("requirements*.txt")]
    for name in names:
        (root / name).symlink_to(copy_model.ROOT / name)
    return root


def test_a_copy_has_the_projects_license_and_citation(project, tmp_path):
    (project / "LICENSE").write_text("as you like\n")
    (project / "CITATION.cff").write_text("cff-version: 1.2.0\n")

    copied("dlrm", tmp_path / "mine", root=project)

    assert (tmp_path / "mine/LICENSE").read_text() == "as you like\n"
    assert (tmp_path / "mine/CITATION.cff").read_text() == "cff-version: 1.2.0\n"
    readme = (tmp_path / "mine/README.md").read_text()
    assert "LICENSE is that of the XLA model zoo" in readme
    assert "CITATION.cff says how to cite it" in readme


def test_a_copy_of_a_project_without_license_says_so(project, tmp_path):
    copied("dlrm", tmp_path / "mine", root=project)

    assert not (tmp_path / "mine/LICENSE").exists()
    readme = (tmp_path / "mine/README.md").read_text()
    assert "has no LICENSE yet: ask its owner" in readme
    assert "CITATION.cff" not in readme


# ---- the README of a copy ------------------------------------------------------------------------
@pytest.mark.parametrize("what", COPIES)
def test_the_readme_says_of_each_file_what_it_is(what, usual):
    copy = usual(what)

    readme = copy.readme
    for file in copy.files:
        text = (copy.folder / file).read_text()
        if text:
            first_words = ast.get_docstring(ast.parse(text)).split()[:3]
            row = f"| [{file}]({file}) | {' '.join(first_words)}"
            assert row in readme, file


@pytest.mark.parametrize("what", COPIES)
def test_the_readme_has_the_lines_to_change_first(what, usual):
    folder = usual(what).folder

    readme = usual(what).readme
    named = re.findall(r"\[(\S+):(\d+)\]\(\1#L\2\) `(\w+)`", readme)
    assert len(named) == 7
    for file, number, name in named:
        line = (folder / file).read_text().splitlines()[int(number) - 1]
        assert re.match(rf"(def|class) {name}\b", line), (file, number, name)
    script = script_of(what)
    assert f"tests/test_{script}.py) `TRIAL`" in readme
    assert "\nTRIAL = " in (folder / f"tests/test_{script}.py").read_text()


def test_the_readme_names_the_page_and_what_was_left_out(tmp_path):
    copied("resnet50", tmp_path, device="cpu", extras=("watch",))

    readme = (tmp_path / "README.md").read_text()
    assert (copy_model.ROOT / "docs/your_task.md").exists()
    assert "docs/your_task.md" in readme
    left_out = readme.split("## What was left out")[1]
    for name in optional.names("WITH"):
        assert (f"`WITH={name}`" in left_out) == (name != "watch"), name
    assert "`DEVICE=xla`" in left_out


def test_the_readme_leaves_out_what_is_of_no_use(usual):
    readme = usual("transformer").readme
    assert "WITH=sharding" in readme
    assert "WITH=predict" not in readme
    assert "WITH=shards" not in readme


def rows(readme: str, heading: str) -> dict[str, str]:
    """Returns the table under a heading of a README: first cell -> second cell."""
    section = readme.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    found = {}
    for line in lines[2:]:
        first, second = line.strip("| ").split(" | ")
        found[first] = second
    return found


def delete(folder: Path, cell: str) -> None:
    """Deletes what a cell of the README's table names: files and folders."""
    for name in re.findall(r"`([^`]+)`", cell):
        path = folder / name
        if name.endswith("/"):
            shutil.rmtree(path)
        else:
            path.unlink()


@pytest.mark.slow  # test_a_plain_copy_says_how_to_get_what_it_leaves_out starts such a copy, too
def test_what_the_readme_lets_one_delete_costs_what_it_says(tmp_path):
    copied("resnet50", tmp_path, extras=("hub_images",))
    prices = rows((tmp_path / "README.md").read_text(), "What can be deleted")
    assert len(prices) == 3

    for cell, price in prices.items():
        if "--device xla" not in price:
            delete(tmp_path, cell)

    refused = train(tmp_path, "resnet50", CIFAR, "--device cpu").stderr
    assert re.search("error: .*cifar10 needs data.hub_images.*\nexit code 2", refused), refused
    assert re.search("error: --device is cpu, but .*\nexit code 2", refused), refused


@pytest.mark.parametrize(("without", "device"), [("xla", "cpu"), ("cpu", "xla")])
def test_a_copy_without_a_device_is_what_that_deletion_leaves(without, device, tmp_path):
    """So what is tested of a copy for one device holds for what is left."""
    files = copied("dlrm", tmp_path / "all")
    prices = rows((tmp_path / "all/README.md").read_text(), "What can be deleted")

    (cell,) = [cell for cell, price in prices.items() if f"--device {without}" in price]
    delete(tmp_path / "all", cell)

    left = {file for file in files if (tmp_path / "all" / file).exists()}
    if without == "xla":
        left.remove("train/common/torchtpu.py")  # of --device tpu, which stays
    assert left == copied("dlrm", tmp_path / "one", device=device)


# ---- training in a copy --------------------------------------------------------------------------
TRAINED = ["bert"]
for what in COPIES:
    if what != "bert":
        TRAINED.append(pytest.param(what, marks=pytest.mark.slow))


@pytest.mark.parametrize("what", TRAINED)
def test_a_copy_trains_in_an_empty_folder(what, tmp_path):
    folder = tmp_path / "mine"
    model, task = model_and_task(what)
    given = [f"MODEL={model}", f"TO={folder}"]
    if task:
        given.append(f"TASK={task}")
    result = make("copy", *given)
    assert result.returncode == 0, result.stderr

    if task:
        train(folder, script_of(what), f"{OF_TASKS[task]} --model {model}")
    elif model in TRIALS:
        train(folder, copy_model.SCRIPTS[model], TRIALS[model])
    else:
        train(folder, "glue", f"{FINE_TUNING} --model {model}")

    report = json.loads((folder / "runs/trial/summary.json").read_text())["report"]
    assert report["recompilations"] == []
    assert report["fallbacks"] == []
    assert any((folder / "runs/trial/export").iterdir())


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_copy_for_one_device_leaves_out_the_other(device, tmp_path):
    copied("dlrm", tmp_path, device=device, extras=("watch",))

    requirements = (tmp_path / "requirements.txt").read_text()
    readme = (tmp_path / "README.md").read_text()
    assert ("torch_xla==" in requirements) == (device == "xla")
    assert ("tiny --device cpu" in readme) == (device == "cpu")  # its commands
    assert ("apt-get install -y libpython3.11" in readme) == (device == "xla")


@pytest.mark.slow  # that for plain PyTorch trains in test_a_copy_passes_its_own_tests
@pytest.mark.parametrize(("device", "other"), [("cpu", "xla"), ("xla", "cpu")])
def test_a_copy_for_one_device_trains_and_refuses_the_other(device, other, tmp_path):
    copied("dlrm", tmp_path, device=device, extras=("watch",))

    lines = [f"{TRIALS['dlrm']} --device {kind}" for kind in (other, device)]
    result = train(tmp_path, "dlrm", *lines, CPU_NUM_DEVICES="1")
    refused = rf"error: --device is {other}, .*copy with DEVICE={other}.*\nexit code 2\n"
    assert re.search(refused, result.stderr)
    assert "auc" in result.stdout, result.stderr


# ---- the test of a copy --------------------------------------------------------------------------
# All that can be copied, for all devices and for one without torch_xla; and the other devices.
TESTED = [("dlrm", "cpu")]
for what in COPIES:
    for device in ("", "cpu"):
        if (what, device) not in TESTED:
            TESTED.append(pytest.param(what, device, marks=pytest.mark.slow))
for device in ("xla", "cuda"):  # cuda: on the CPU where there is no GPU
    TESTED.append(pytest.param("dlrm", device, marks=pytest.mark.slow))


@pytest.mark.parametrize(("what", "device"), TESTED)
def test_a_copy_passes_its_own_tests(what, device, tmp_path):
    folder = tmp_path / "mine"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    copied(what, folder, device=device)

    assert passed_tests(folder, scratch, with_xla=device in ("", "xla")) == 4


# A line of the script, what it is broken to, and the test that finds it.
BROKEN = [
    ("    loss.backward()\n", "    (0 * loss).backward()\n", "test_it_learns"),
    (
        "        seed=config.seed,\n",
        '        seed=int.from_bytes(__import__("os").urandom(4)),\n',
        "test_a_stopped_run_ends_as_one_that_was_not",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "broken", "test"), BROKEN, ids=["loss", "seed"])
def test_the_test_of_a_copy_can_fail(line, broken, test, tmp_path):
    folder = tmp_path / "mine"
    copied("dlrm", folder, device="cpu")
    script = folder / "train/dlrm.py"
    text = script.read_text()
    assert text.count(line) == 1
    script.write_text(text.replace(line, broken))

    with pytest.raises(AssertionError) as failed:
        passed_tests(folder, tmp_path, with_xla=False)

    assert "1 failed, 3 passed" in str(failed.value)
    assert f"::{test} " in str(failed.value)


@pytest.mark.parametrize(
    ("what", "device"),
    [*((what, "") for what in COPIES), ("dlrm", "cpu"), ("dlrm", "cuda"), ("resnet50", "tpu")],
)
def test_the_test_of_a_copy_is_well_formed(what, device, usual, tmp_path):
    if device:
        folder = tmp_path
        copied(what, folder, device=device)
    else:
        folder = usual(what).folder

    settings = ["--config", str(copy_model.ROOT / "pyproject.toml")]
    for words in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *words, *settings, str(folder / "tests")]
        result = subprocess.run(ruff, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout
    requirements = (folder / "requirements.txt").read_text()
    assert "\npytest==" in requirements


# ---- what a copy comes without -------------------------------------------------------------------
CIFAR = "--data uoft-cs/cifar10"


def test_a_plain_copy_says_how_to_get_what_it_leaves_out(tmp_path):
    copied("resnet50", tmp_path)

    refused = train(tmp_path, "resnet50", "--shard-state full", CIFAR).stderr

    layout = "error: .*--shard-state or --remat needs train.common.sharding.*WITH=sharding"
    assert re.search(layout, refused), refused
    hub = "error: .*cifar10 needs data.hub_images.*make copy … WITH=hub_images.*\nexit code 2"
    assert re.search(hub, refused), refused


def test_a_copy_brings_what_was_asked_for(tmp_path):
    files = copied("resnet50", tmp_path, extras=("watch", "sharding", "hub_images"))

    for path in copy_model.ROOT.glob("train/common/watch/*.py"):
        assert str(path.relative_to(copy_model.ROOT)) in files
    assert {"data/hub_images.py", "train/common/xla/pin_sharding.py"} <= files
    assert "\ndatasets==" in (tmp_path / "requirements.txt").read_text()

    flags = f"{CIFAR} --stall-after 30 --shard-state full"  # of hub_images, watch and sharding
    refused = train(tmp_path, "resnet50", flags, HF_HUB_OFFLINE="1").stderr
    no_data = "cifar10 is neither a folder nor a data set of the hub.*\nexit code 2"
    assert re.search(no_data, refused), refused


# By model: what its copy predicts with, of train/prediction.
PREDICTS = {
    "resnet50": {"pictures"},
    "bert": {"sentences", "submission"},
    "auto": {"sentences", "submission"},
    "bert squad": {"answers"},
    "bert ner": {"entities"},
    "dlrm": {"clicks"},
}
EVERY_KIND = {"pictures", "sentences", "submission", "answers", "entities", "clicks"}


@pytest.mark.parametrize("model", PREDICTS)
def test_a_copy_predicts_what_its_model_is_for(model, usual, tmp_path):
    without = usual(model).files
    assert not [file for file in without if file.startswith("train/predict")]

    files = copied(model, tmp_path / "with", extras=("predict",))

    assert {"train/predict.py", "train/prediction/pieces.py"} <= files
    kinds = {kind for kind in EVERY_KIND if f"train/prediction/{kind}.py" in files}
    assert kinds == PREDICTS[model]
    others = {"models/resnet.py": "resnet50", "models/dlrm.py": "dlrm"}
    assert not [file for file, owner in others.items() if file in files and owner != model]


@pytest.mark.parametrize("model", ["resnet50", pytest.param("bert", marks=pytest.mark.slow)])
def test_a_copy_predicts_in_its_folder(model, tmp_path, mesh):
    copied(model, tmp_path, device="cpu", extras=("predict",))
    new = tmp_path / "new"
    if model == "resnet50":
        write_network(tmp_path / "export", mesh)
        write_pictures(new, ["a.jpg", "b.jpg"])
    else:
        write_classifier(tmp_path / "export", ("no", "yes"))
        write_lines(new, ["the dog", "a cat"])
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    environment["CPU_NUM_DEVICES"] = "1"

    words = command("export", "new")
    result = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2


# ---- a new encoder -------------------------------------------------------------------------------
# The record of an encoder that the project does not have, and its line.
LINE = '    "electra": "models.encoders.electra",\n'
ELECTRA = '''"""ELECTRA (Clark et al. 2020, arXiv:2003.10555)."""

from transformers import ElectraConfig

from models.encoders.record import Encoder, FineTuning, LanguageHead, Partition, Pretraining
from models.encoders.record import QuestionAnswering
from models.partition import IN, OUT, VECTOR, VOCABULARY


def new_configuration(size, tokenizer, max_tokens):
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


def token_logits(model, hidden):
    return model.generator_lm_head(model.generator_predictions(hidden))


ENCODER = Encoder(
    architecture="electra",
    tokenizer="bert",
    published=ElectraConfig(),
    new_configuration=new_configuration,
    partition=Partition(
        parameters={
            r"attention\\.self\\.(query|key|value)\\.weight": OUT,
            r"attention\\.self\\.(query|key|value)\\.bias": VECTOR,
            r"attention\\.output\\.dense\\.weight": IN,
            r"intermediate\\.dense\\.weight": OUT,
            r"intermediate\\.dense\\.bias": VECTOR,
            r"\\d+\\.output\\.dense\\.weight": IN,
            r"word_embeddings\\.weight": VOCABULARY,
        },
        layer_list="electra.encoder.layer",
        shared=r"attention\\.self$",
    ),
    language_head=LanguageHead(
        module="generator_lm_head",
        parameters={r"generator_lm_head\\.bias": VECTOR},
        token_logits=token_logits,
    ),
    fine_tuning=FineTuning(
        source="made up",
        checkpoint="google/electra-base-discriminator",
        lr=1e-4,
        warmup=0.1,
        weight_decay=0.01,
        epochs=3,
    ),
    question_answering=QuestionAnswering(
        source="made up",
        lr=1e-4,
        warmup=0.1,
        weight_decay=0.01,
        epochs=2,
        batch_size=32,
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
    berts_layers="encoder",
)
'''


@pytest.fixture(scope="module")
def with_electra(tmp_path_factory) -> Path:
    """Returns the project with one encoder more: a file, and a line."""
    root = tmp_path_factory.mktemp("project")
    for name in ("train", "models", "data", "copied", "tpu"):
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
        pytest.param("", f"{FINE_TUNING} --mesh data=2,model=2", marks=pytest.mark.slow),
        pytest.param("pretrain", PRETRAINING, marks=pytest.mark.slow),
        pytest.param("squad", SHORT, marks=pytest.mark.slow),
    ],
)
def test_a_new_encoder_is_one_file_and_one_line(task, flags, with_electra, tmp_path):
    """It is copied, and its copy trains, layers cut over devices included."""
    folder = tmp_path / "mine"
    given = ["MODEL=electra", f"TASK={task}", f"TO={folder}", "WITH=sharding"]
    result = make("copy", "-C", str(with_electra), *given)
    assert result.returncode == 0, result.stderr
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
    assert "models/encoders/electra.py" in files
    assert "models/encoders/bert.py" not in files
    assert ("models/masked_words.py" in files) == (task == "pretrain")

    train(folder, task or "glue", f"{flags} --model electra", CPU_NUM_DEVICES="4")

    run = folder / "runs/trial"
    report = json.loads((run / "summary.json").read_text())["report"]
    assert report["recompilations"] == []
    config = json.loads((run / "export/config.json").read_text())
    assert config["model_type"] == "electra"


def test_make_copy_and_the_scripts_know_the_same_encoders():
    names = list(encoders.NAMES)
    assert list(copy_model.ENCODERS) == names

    models = re.search(r"^MODEL    one of: (.*)$", make("help").stdout, re.MULTILINE)[1].split()
    assert models[-len(names) :] == names


def test_make_and_the_scripts_know_the_same_tasks():
    refusal = make("train", "MODEL=bert", "TASK=SQuAD").stderr
    tasks = re.search(r"TASK=SQuAD is not known; TASK is one of: (.*)$", refusal, re.MULTILINE)[1]
    assert sorted(tasks.split()) == sorted([*glue.TASKS, *optional.SCRIPTS_OF_TASKS])


@pytest.mark.parametrize("task", ["mr%", "squad ", "cola sst2", "it's"])
def test_make_takes_a_task_by_its_exact_name(task):
    # Before anything is installed, and before a shell reads what it was given.
    for target in ("train", "compile", "doctor"):
        refusal = make(target, "MODEL=bert", f"TASK={task}")
        assert refusal.returncode == 2
        assert f"TASK={task} is not known; TASK is one of: cola" in refusal.stderr


@pytest.mark.parametrize("target", ["compile", "doctor", "accept", "bench"])
def test_make_refuses_a_device_where_it_chooses_nothing(target):
    refusal = make(target, "MODEL=bert", "BENCH=step_time", "DEVICE=cpu")
    assert refusal.returncode == 2
    assert refusal.stderr.startswith(f"error: DEVICE=cpu is not for make {target}; leave it out")


def test_make_doctor_knows_models_and_their_tasks():
    unknown = make("doctor", "MODEL=vgg")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("error: MODEL=vgg is not known; MODEL is one of: resnet50")

    not_its = make("doctor", "MODEL=dlrm", "TASK=mrpc")
    assert not_its.returncode == 2
    assert not_its.stderr.startswith("error: TASK=mrpc is for the encoders, and MODEL=dlrm has one")


def test_make_refuses_dlrm_before_it_installs_torchtpu(tmp_path):
    # Without the refusal there would be an installation, which this PYTHON fails at once.
    refusal = make("train", "MODEL=dlrm", "DEVICE=tpu", "PYTHON=false", f"VENV={tmp_path}/venv")
    assert refusal.returncode == 2
    assert "MODEL=dlrm is not for DEVICE=tpu: torchrec" in refusal.stderr
    assert "installing" not in refusal.stdout


# ---- refusals ------------------------------------------------------------------------------------
# Arguments, without TO=, and the sentence.
REFUSED = [
    (["MODEL=vgg"], "MODEL=vgg is not known.*resnet50"),
    (["MODEL=resnet50", "DEVICE=gpu"], "DEVICE=gpu is not known.*xla cpu cuda tpu"),
    (["MODEL=dlrm", "DEVICE=tpu"], "MODEL=dlrm is not for DEVICE=tpu: torchrec"),
    (["MODEL=auto", "TASK=pretrain"], "MODEL=auto is for fine-tuning"),
    (["MODEL=bert", "TASK=pretain"], "TASK=pretain is not one of MODEL=bert.*pretrain"),
    (["MODEL=dlrm", "TASK=pretrain"], "TASK=pretrain is not one of MODEL=dlrm"),
    (["MODEL=resnet50", "WITH=watch board"], "WITH=board is not known.*watch sharding"),
    (["MODEL=transformer", "WITH=predict"], "WITH=predict is not for this copy.*translate.py"),
    (["MODEL=bert", "TASK=pretrain", "WITH=predict"], "WITH=predict.*leave out TASK=pretrain"),
]


def assert_refused(sentence: str, *arguments: str) -> None:
    result = make("copy", *arguments)
    assert result.returncode != 0
    assert re.search(sentence, result.stderr), result.stderr


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_what_cannot_be_copied_is_refused(arguments, sentence, tmp_path):
    assert_refused(sentence, *arguments, f"TO={tmp_path}/new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("to", "sentence"),
    [
        ([], "TO is missing.*TO=../mine"),
        (["TO=gs://bucket/mine"], "TO=gs://bucket/mine is a URL"),
        (["TO=/proc/it's mine"], "cannot write to TO=/proc/it's mine"),
    ],
    ids=["missing", "URL", "not writable"],
)
def test_a_folder_that_cannot_be_written_is_refused(to, sentence):
    assert_refused(sentence, "MODEL=resnet50", *to)


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")

    assert_refused("is there and not an empty folder", "MODEL=resnet50", f"TO={tmp_path}")

    assert notes.read_text() == "mine"
