"""What keeps the repository readable and its README true."""

import ast
import dataclasses
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NO_TRAINING = ("__init__.py", "translate.py")
SCRIPTS = sorted(path for path in (ROOT / "train").glob("*.py") if path.name not in NO_TRAINING)


def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def make(*arguments: str) -> subprocess.CompletedProcess:
    given = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS"}  # to the make that runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in given}
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment)


def test_only_the_common_module_imports_torch_xla():
    folders = ("train", "models", "data", "bench", "tpu")
    strays = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "torch_xla" in imports(path) and path.parent != ROOT / "train/common"
    ]
    assert strays == []


def test_models_and_data_know_nothing_of_training():
    # A data set that is prepared before training has a command line of its own.
    for folder, strangers in {"models": {"train", "torch_xla", "tyro"}, "data": {"train", "torch_xla"}}.items():
        for path in (ROOT / folder).glob("*.py"):
            assert not imports(path) & strangers, path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_short_and_reads_like_the_others(script):
    lines = script.read_text().splitlines()
    assert len(lines) <= 330, "people copy it: shorten it, or move what is specific to XLA to train/common"
    tree = ast.parse(script.read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    order = ["Config", "train_step", "evaluate", "main"]
    assert [name for name in names if name in order] == order
    assert ast.get_docstring(tree)
    module = importlib.import_module(f"train.{script.stem}")
    assert module.Config.__dataclass_params__.frozen
    assert len(dataclasses.fields(module.Config)) <= 25
    assert isinstance(module.TINY, module.Config)
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    for field in config.body:
        if isinstance(field, ast.AnnAssign):
            assert "  # " in lines[field.lineno - 1], f"{field.target.id} has no comment: --help shows it"


def test_public_functions_have_docstrings():
    for folder in ("train", "models", "data"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                # A Config has a comment a field instead.
                public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith(("_", "Config"))
                if public:
                    assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_requirements_are_pinned_and_say_why():
    for file in ROOT.glob("requirements*.txt"):
        for line in file.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[\w-]+==[\d.]+ +# .+", line), line


def test_lint():
    for command in (["check"], ["format", "--check"]):
        result = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_every_make_command_of_the_readme_is_one():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"(?:^    |`)(?:\w+=\w+ )*(make [^`#\n]+|python -m [^`#\n]+)", readme, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        program, *arguments = shlex.split(re.sub(r" < .*", "", command))  # what the shell takes
        if program == "make":
            result = make("-n", *arguments)
            assert result.returncode == 0, (command, result.stderr)
        else:
            assert (ROOT / f"{arguments[1].replace('.', '/')}.py").exists(), command


def test_every_link_of_the_readme_leads_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_make_explains_itself_and_lists_the_models():
    assert "make train MODEL=" in make().stdout
    for arguments in (["train"], ["train", "MODEL=vgg"]):
        result = make(*arguments)
        assert result.returncode != 0 and "MODEL is one of: resnet50" in result.stderr
    assert '--data "$DATA" ' in make("-n", "train", "MODEL=resnet50", "DATA=/a b").stdout
    assert "train.resnet50 full" in make("-n", "train", "MODEL=resnet50", "DATA=/images").stdout
    assert "train.resnet50 tiny" in make("-n", "train", "MODEL=resnet50").stdout
    assert "train.dlrm kaggle" in make("-n", "train", "MODEL=dlrm", "DATA=/clicks").stdout
    assert "train.dlrm mlperf_v2" in make("-n", "train", "MODEL=dlrm", "DATA=/clicks", "PRESET=mlperf_v2").stdout


def test_make_train_with_a_tpu_hands_what_it_was_given_to_the_launcher():
    given = ["MODEL=bert", "TASK=mrpc", "DATA=/a b", "TPU=my-tpu", "ZONE=z", "RUN=first", "ENV=A=b", "RETRIES=2"]
    command = " ".join(make("-n", "train", *given).stdout.replace("\\\n", " ").split())
    assert 'tpu.launch train --tpu "$TPU" --zone "$ZONE" --run "$RUN" --env "$ENV" --retries "$RETRIES"' in command
    assert command.endswith('-- "MODEL=$MODEL" "TASK=$TASK" "DATA=$DATA"')
    assert "train.resnet50 tiny" in make("-n", "train", "MODEL=resnet50", "TPU=local").stdout
    result = make("logs")
    assert result.returncode == 2 and "TPU is missing" in result.stderr


def test_make_data_prepares_what_it_knows():
    for arguments, word in ((["DATASET=imagenet"], "is one of: criteo text"), (["DATASET=criteo"], "DATA is missing")):
        result = make("data", *arguments)
        assert result.returncode != 0 and word in result.stderr
    command = make("-n", "data", "DATASET=criteo", "DATA=/a b", "OUT=/c d").stdout
    assert '-m data.prepare.criteo --data "$DATA" --out "$OUT"' in command


def test_continuous_integration_runs_make_test():
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec make test"
