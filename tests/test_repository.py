"""What keeps the repository readable and its pages true: who imports whom, one shape of all scripts, commands."""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import copy_model
import optional

ROOT = Path(__file__).parent.parent
SCRIPTS = [ROOT / f"train/{name}.py" for name in ("resnet50", "transformer", "glue", "pretrain", "dlrm")]
FOLDERS = ("train", "models", "data", "tpu", "bench", "research")
CODE = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "research").rglob("*.md"))]

# The names of a script, in this order.
CONTRACT = ["Config", "learning_rate", "validate", "open_data", "build", "train_step", "eval_step", "evaluate", "main"]


def imports(path: Path) -> set[str]:
    """Returns the top-level packages that a file imports, anywhere in it."""
    return {name.split(".")[0] for name in copy_model.imported(ast.parse(path.read_text()))}


def make(*arguments: str, python: str = "python3") -> subprocess.CompletedProcess:
    """python: "" lets make look for one, which takes a second where these are pyenv's."""
    given = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS", "PYTHON"}  # to the make that runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in given}
    environment |= {"PYTHON": python} if python else {}
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment)


def test_only_the_common_module_imports_torch_xla():
    users = [str(path.relative_to(ROOT)) for path in CODE if "torch_xla" in imports(path)]
    places = [module.replace(".", "/") for module in optional.part("xla").modules]
    places.append("train/common/watch/profile.py")
    places.append("tpu/compiler/staging.py")  # which trains nothing
    assert users and all(user.startswith(tuple(places)) for user in users), users


def test_arrows_go_one_way():
    strangers = {
        "train/common": {"models", "data", "tpu", "bench", "research"},
        "models": {"train", "data", "tpu", "bench", "research", "torch_xla", "tyro"},
        # A preparation has a command line of its own.
        "data": {"train", "models", "tpu", "bench", "research", "torch_xla"},
        "train": {"tpu", "bench", "research"},
        "tpu": {"bench", "research"},
        "bench": {"research"},
    }
    for path in CODE:
        for folder, others in strangers.items():
            if path.is_relative_to(ROOT / folder) and path.name != "_flops.py":  # which can do without
                assert not imports(path) & others, path


def files_imported(path: Path, modules: dict[str, Path]) -> set[str]:
    """Returns which of `modules`, {dotted name: file}, a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                found.add(below if below in modules else node.module)
    return found & modules.keys()


def test_no_file_imports_another_in_a_circle():
    modules = {}
    for path in CODE:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    waiting = {name: files_imported(path, modules) - {name} for name, path in modules.items()}

    # A file of which everything that it imports is gone can go, too; what stays imports in a circle.
    while leaves := [name for name, others in waiting.items() if not others & waiting.keys()]:
        for name in leaves:
            del waiting[name]
    assert not waiting, {name: sorted(others & waiting.keys()) for name, others in waiting.items()}


def test_backends_alone_ask_for_the_spmd_mesh():
    asks = re.compile(r"spmd is (not )?None|if .*\bmesh\.spmd\b")
    asking = [path for path in CODE if asks.search(path.read_text())]
    answering = ("train/common/mesh.py", "train/common/sharding/placement.py")  # Mesh.compiles, Layers.compiles
    allowed = ("train/common/xla/", "tpu/compiler/staging.py", *answering)
    strangers = [name for path in asking if not (name := str(path.relative_to(ROOT))).startswith(allowed)]
    assert strangers == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_reads_like_the_others(script):
    text, tree = script.read_text().splitlines(), ast.parse(script.read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert [name for name in defined if name in CONTRACT] == CONTRACT
    assert ast.get_docstring(tree)
    module = importlib.import_module(f"train.{script.stem}")
    assert {"train", "eval"} <= set(module.Data._fields) and {"model", "optimizer"} <= set(module.State._fields)
    arguments = {"validate": "config", "open_data": "config", "build": "config data mesh", "main": "config"}
    for name, expected in (arguments | dict.fromkeys(("train_step", "eval_step"), "state batch config mesh")).items():
        assert [argument.arg for argument in defined[name].args.args] == expected.split(), name
    assert module.Config.__dataclass_params__.frozen
    assert isinstance(module.TINY, module.Config)
    for field in defined["Config"].body:
        if isinstance(field, ast.AnnAssign):
            assert "  # " in text[field.lineno - 1], f"{field.target.id} has no comment: --help shows it"


def test_public_functions_have_docstrings():
    documented = ("backend.py", "eager.py")  # by device.py
    for path in CODE:
        if path.relative_to(ROOT).parts[0] in ("train", "models", "data") and path.name not in documented:
            for node in ast.parse(path.read_text()).body:
                # A Config has a comment a field instead.
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith(("_", "Config")):
                    assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_requirements_are_pinned_and_say_why():
    for file in ROOT.glob("requirements*.txt"):
        for line in file.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[\w-]+==[\d.]+ +# .+", line), line


def test_the_small_requirements_are_lines_of_the_whole():
    whole = (ROOT / "requirements.txt").read_text().splitlines()
    small = [line for line in (ROOT / "requirements-eager.txt").read_text().splitlines() if line[0] != "#"]
    assert small == [line for line in whole if line in small] and not any(
        line.startswith("torch_xla") for line in small
    )


def test_lint():
    for command in (["check"], ["format", "--check"]):
        result = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def commands(page: Path) -> list[str]:
    """Returns the make and python commands of a page, in indented blocks and in code spans."""
    return re.findall(r"(?:^    |`)(?:\w+=\w+ )*(make [^`#\n]+|python -m [^`#\n]+)", page.read_text(), re.MULTILINE)


def test_every_command_of_the_pages_is_one():
    assert sum(len(commands(page)) for page in PAGES) >= 40
    checked = set()
    # Spaces before a comment are no part of a command.
    for command in {command.rstrip() for page in PAGES for command in commands(page)}:
        program, *arguments = shlex.split(re.sub(r"\\$| < .*", "", command))  # what the shell takes
        if program == "make":
            result = make("-n", *arguments)
            assert result.returncode == 0, (command, result.stderr)
        else:
            module = ROOT / arguments[1].replace(".", "/")
            assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), command
        checked.add(program)
    assert checked == {"make", "python"}


def headings(page: Path) -> list[str]:
    """Returns the headings of a page, without marks; a code block of these pages is indented, and has none."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip() for heading in found]


def anchors(page: Path) -> set[str]:
    """Returns the names that GitHub gives the headings of a page."""
    names = []
    for heading in headings(page):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        names.append(words.replace(" ", "-"))
    assert len(names) == len(set(names)), f"{page}: two headings of one name"
    return set(names)


def test_every_link_of_the_pages_leads_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            if ":" in path:  # a URL
                continue
            target = page.parent / path if path else page
            assert target.exists(), (page.name, link)
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), (page.name, link)


def test_every_page_that_code_names_is_there():
    """Comments, docstrings and messages name a page as it is, or with an anchor, or with a heading in quotes."""
    named = r'\b((?:docs|research)/[\w/]+\.md)(?:#([\w-]+))?(?:, "([^"]+)")?'
    texts = [ROOT / "Makefile", ROOT / "Dockerfile", ROOT / "copy_model.py", ROOT / "errors.py"]
    texts += sorted(ROOT.glob("requirements*.txt")) + sorted((ROOT / "tests").glob("*.py"))
    for folder in (*FOLDERS, "docs", "examples", "notebooks"):
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".yaml", ".ipynb")]
    found = 0
    for text in texts:
        for name, anchor, heading in re.findall(named, text.read_text()):
            page = ROOT / name
            assert page.exists(), (text.name, name)
            assert not anchor or anchor in anchors(page), (text.name, name, anchor)
            assert not heading or heading in headings(page), (text.name, name, heading)
            found += 1
    assert found >= 40


def test_what_the_findings_name_is_in_the_code():
    text = (ROOT / "docs/tpu/findings.md").read_text()
    places = re.findall(r"((?:`\w+`, )*`\w+`) in ([\w/]+\.py)", text)
    assert len(places) >= 20
    for names, path in places:
        for name in re.findall(r"\w+", names):
            defined = rf"^ *(def|class) {name}\b|^{name} = "
            assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE), (name, path)


def test_make_explains_itself_and_lists_the_models():
    assert "make train MODEL=" in make().stdout
    for arguments in ([], ["MODEL=vgg"]):
        result = make("train", *arguments)
        assert result.returncode != 0 and "MODEL is one of: resnet50" in result.stderr
    for arguments, command in (
        (["MODEL=resnet50", "DATA=/a b"], 'train.resnet50 full  --data "$DATA" '),
        (["MODEL=resnet50"], "train.resnet50 tiny"),
        (["MODEL=dlrm", "DATA=/clicks"], "train.dlrm kaggle"),
        (["MODEL=dlrm", "DATA=/clicks", "PRESET=mlperf_v2"], "train.dlrm mlperf_v2"),
    ):
        assert command in make("-n", "train", *arguments).stdout


def test_make_train_with_a_tpu_hands_what_it_was_given_to_the_launcher(monkeypatch):
    def command(*given: str) -> str:
        return " ".join(make("-n", "train", "MODEL=bert", *given).stdout.replace("\\\n", " ").split())

    given = ["TASK=mrpc", "DATA=/a b", "TPU=my-tpu", "ZONE=z", "RUN=first", "ENV=A=b", "RETRIES=2"]
    whole = command(*given, "LAUNCH_ARGS=--port 1")
    assert 'tpu.launch train --tpu "$TPU" --zone "$ZONE" --run "$RUN" --env-from ENV --retries "$RETRIES"' in whole
    assert whole.endswith('--retries "$RETRIES" --port 1 -- "MODEL=$MODEL" "TASK=$TASK" "DATA=$DATA" "PYTHON=$PYTHON"')
    assert "train.resnet50 tiny" in make("-n", "train", "MODEL=resnet50", "TPU=local").stdout
    result = make("logs")
    assert result.returncode == 2 and "TPU is missing" in result.stderr
    # What shells often have set for something else is not taken from the environment.
    monkeypatch.setenv("NAME", "me")
    monkeypatch.setenv("ENV", "production")
    monkeypatch.setenv("DATA", "/a b")
    assert command("TPU=my-tpu").endswith('--tpu "$TPU" -- "MODEL=$MODEL" "PYTHON=$PYTHON"')
    assert "--data" not in command() and "--name" not in command()
    sky = command("ENGINE=sky", "BUCKET=gs://b", "RUN=first", "PRESET=tiny", "DATA=/a b")
    assert sky.endswith('--env "MODEL=$MODEL" --env "PRESET=$PRESET" --env "DATA=$DATA"')
    assert "needs BUCKET=" in make("train", "MODEL=bert", "ENGINE=sky").stderr
    assert "takes MODEL TASK PRESET" in make("train", "MODEL=bert", "ENGINE=sky", "RETRIES=2").stderr


def test_the_makefile_is_one_for_the_make_of_a_mac():
    """GNU make 3.81, from which runs are started on a TPU: at what came later it stops with "missing separator".
    Reading a file by $(file …), which it takes for an empty variable, matters where something is installed, on Linux.
    """
    text = (ROOT / "Makefile").read_text()
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    newer = r"\bundefine\b|^\s*private\b|\.ONESHELL|\.SHELLFLAGS|\.RECIPEPREFIX|^\w+\s*(?:!=|::=)"
    newer += r"|\$\(file >|\$\(let |\$\(intcmp "
    assert re.findall(newer, code, re.MULTILINE) == []


# Of the Makefile's variables those that a user gives: its own help names them, PYTHON aside.
ARGUMENTS = ("VENV", "DATA", "PRESET", "MODEL", "TASK", "DEVICE", "OUT", "NAME", "TPU", "RUNS", "ARGS", "TO", "WITH")


def test_no_variable_of_the_shell_is_an_argument_of_make(monkeypatch):
    targets = ["train", "data", "copy", "doctor", "board", "bench", "translate", "compile", "logs", "clean"]
    given = ["MODEL=bert", "TASK=mrpc", "DATASET=text", "DATA=/d", "TO=/t", "BENCH=goodput", "MODEL_DIR=/e", "TPU=t"]

    def printed(target: str) -> str:
        return make("-n", target, *(given if target != "train" else given[:2])).stdout

    expected = {target: printed(target) for target in targets}
    for name in ARGUMENTS:
        monkeypatch.setenv(name, "/somewhere/else")
    assert {target: printed(target) for target in targets} == expected
    result = make("-n", "train", "MODEL=bert")
    (note,) = result.stderr.splitlines()
    assert note.startswith("note: not taken from the environment: ") and "VENV" in note and "DATA" in note
    assert "MODEL " not in note, "it is an argument here"
    result = make("data", "DATASET=text")
    assert result.returncode == 2 and "DATA is missing" in result.stderr
    result = make("-e", "clean")
    assert result.returncode == 2 and "leave out -e" in result.stderr

    # Nor a name that the Makefile makes up of an argument.
    monkeypatch.setenv("PRESET_bert", "lamb")
    assert "train.glue full" in make("-n", "train", "MODEL=bert", "DATA=/glue").stdout


def test_make_clean_removes_what_make_has_made_and_nothing_else(tmp_path, monkeypatch):
    shutil.copy(ROOT / "Makefile", tmp_path)
    code = ("train", "models", "data", "tpu", "bench", "research", "docs", "examples", "tests")
    for name in (*code, "mine", "linked", "runs"):
        (tmp_path / name / "__pycache__").mkdir(parents=True)
        (tmp_path / name / "__pycache__/a.cpython-311.pyc").touch()
    (tmp_path / "data/__pycache__/kept.txt").touch()
    (tmp_path / ".venv").symlink_to("linked")
    for name in (".venv-jax/.installed", ".venv-board/.made-by-make", "made/.made-by-make", "mine/.installed"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def clean(*arguments: str) -> str:
        result = subprocess.run(["make", "clean", *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stderr

    monkeypatch.delenv("MAKEFLAGS", raising=False)
    monkeypatch.delenv("MAKELEVEL", raising=False)
    monkeypatch.setenv("VENV", "made")
    assert "kept .venv: it is a link" in clean()
    assert "kept mine: make has not made it" in clean("VENV=mine")
    left = {path.name for path in tmp_path.iterdir()}
    assert {"made", "mine", "linked", ".venv", "runs"} <= left and not {".venv-jax", ".venv-board"} & left
    assert not list(tmp_path.glob("train/*")) and [path.name for path in tmp_path.glob("data/*/*")] == ["kept.txt"]
    assert list(tmp_path.glob("mine/*/*.pyc")) and list(tmp_path.glob("runs/*/*.pyc"))
    clean("VENV=made")
    assert not (tmp_path / "made").exists()


def test_an_environment_has_makes_mark_before_anything_is_in_it_unless_it_was_there(tmp_path):
    """The stand-in for Python makes no environment."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in -c*|"-m tpu.libpython") ;; *) exit 3 ;; esac\n')
    python.chmod(0o755)
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        assert make("install", f"VENV={tmp_path}/{name}", f"PYTHON={python}").returncode == 2
    assert (tmp_path / "new/.made-by-make").exists() and not list((tmp_path / "mine").iterdir())


def test_make_takes_a_device_where_it_means_something():
    for target, eager in (("train", True), ("translate", True), ("compile", False), ("lint", False)):
        variables = make("-pn", target, "MODEL=dlrm", "MODEL_DIR=x", "DEVICE=cpu").stdout
        assert ("\nEAGER := cpu\n" in variables) == eager, target
    assert '--model-dir "$MODEL_DIR" --device "$DEVICE"' in make("-n", "translate", "MODEL_DIR=x", "DEVICE=cpu").stdout
    for arguments in (["install", "DEVICE=gpu"], ["train", "MODEL=dlrm", "DEVICE=cpu", "TPU=my-tpu"]):
        result = make(*arguments)
        assert result.returncode == 2 and re.search("DEVICE=gpu is not known|not on TPU=my-tpu", result.stderr)


@pytest.mark.parametrize("codes", [(127, 1, 0), (127, 0, 127)])  # as pyenv's, without that version; not there
def test_make_takes_the_first_python_that_works_and_refuses_another(codes, tmp_path, monkeypatch):
    for name, code in zip(("python3.11", "python3.12", "python3.13"), codes, strict=True):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = f"python3.{11 + codes.index(0)}"
    assert f"\n{found} -m venv {tmp_path}/new\n" in make("-n", "install", f"VENV={tmp_path}/new", python="").stdout
    result = make("install", f"VENV={tmp_path}/new", "PYTHON=false")
    assert result.returncode == 2 and "3.13 is needed, false is not it; use PYTHON=" in result.stderr


def test_make_data_prepares_what_it_knows():
    for arguments, word in ((["DATASET=imagenet"], "of: criteo images text"), (["DATASET=criteo"], "DATA is missing")):
        result = make("data", *arguments)
        assert result.returncode != 0 and word in result.stderr
    command = make("-n", "data", "DATASET=criteo", "DATA=/a b", "OUT=/c d").stdout
    assert '-m data.prepare.criteo --data "$DATA" --out "$OUT"' in command


def test_the_workflow_runs_ci_on_every_python_that_make_takes():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    pythons = re.search(r"for python in (python3[^;]+);", (ROOT / "Makefile").read_text())[1].split()
    versions = jobs["ci"]["strategy"]["matrix"]["python"]
    assert [f"python{version}" for version in versions] == pythons
    last = jobs["ci"]["steps"][-1]
    assert last["run"] == "bash .ci/run" and last["env"] == {"PYTHON": "python${{ matrix.python }}"}


@pytest.mark.parametrize("failing", ["", "test", "guards"])
def test_continuous_integration_runs_the_tests_and_the_guards(failing, tmp_path):
    """With a `make` that stands in for both: both run, each last line is shown, and one that fails is enough."""
    fake = tmp_path / "make"
    last = "echo 7 passed in 1.5s '(0:00:01)'; [ $1 = guards ] && echo 3 passed in 2s"
    fake.write_text(f'#!/bin/sh\n{last}\n[ "$1" != "{failing}" ]\n')
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run([ROOT / ".ci/run"], env=environment, capture_output=True, text=True)
    assert result.stdout.splitlines()[-2:] == ["7 passed in 1.5s (0:00:01)", "3 passed in 2s"]
    assert (result.returncode == 0) == (not failing), result.stdout + result.stderr
