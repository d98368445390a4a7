"""What keeps the repository readable and its pages true: who imports whom, one shape of all
scripts, commands."""

import ast
import importlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from run_make import ROOT, make

import copy_model
import optional

SCRIPTS = [
    ROOT / f"train/{name}.py" for name in ("resnet50", "transformer", "glue", "pretrain", "dlrm")
]
FOLDERS = ("train", "models", "data", "tpu", "bench", "research")
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "research").rglob("*.md")),
]


def code_files() -> list[Path]:
    """Returns the Python files of FOLDERS, without those that are generated."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in path.name:
                found.append(path)
    return found


CODE = code_files()


# ---- who imports whom ----------------------------------------------------------------------------
def imports(path: Path) -> set[str]:
    """Returns the top-level packages that a file imports, anywhere in it."""
    names = copy_model.imported(path.read_text())
    return {name.split(".")[0] for name in names}


def test_only_the_common_module_imports_torch_xla():
    allowed = [module.replace(".", "/") for module in optional.part("xla").modules]
    allowed.append("train/common/watch/profile.py")
    allowed.append("tpu/compiler/staging.py")  # which trains nothing

    users = [str(path.relative_to(ROOT)) for path in CODE if "torch_xla" in imports(path)]

    assert users
    assert all(user.startswith(tuple(allowed)) for user in users), users


# What a folder must not import.
STRANGERS = {
    "train/common": {"models", "data", "tpu", "bench", "research"},
    "models": {"train", "data", "tpu", "bench", "research", "torch_xla", "tyro"},
    # A preparation has a command line of its own.
    "data": {"train", "models", "tpu", "bench", "research", "torch_xla"},
    "train": {"tpu", "bench", "research"},
    "tpu": {"bench", "research"},
    "bench": {"research"},
}


@pytest.mark.parametrize("folder", STRANGERS)
def test_arrows_go_one_way(folder):
    for path in CODE:
        # _flops.py can do without what it imports.
        if path.is_relative_to(ROOT / folder) and path.name != "_flops.py":
            assert not imports(path) & STRANGERS[folder], path


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

    # A file of which everything that it imports is gone can go, too; what stays imports in a
    # circle.
    leaves = list(waiting)
    while leaves:
        leaves = [name for name, others in waiting.items() if not others & waiting.keys()]
        for name in leaves:
            del waiting[name]

    circles = {name: sorted(others & waiting.keys()) for name, others in waiting.items()}
    assert circles == {}


def test_backends_alone_ask_for_the_spmd_mesh():
    asks = re.compile(r"spmd is (not )?None|if .*\bmesh\.spmd\b")
    allowed = (
        "train/common/xla/",
        "tpu/compiler/staging.py",
        "train/common/mesh.py",  # Mesh.compiles
        "train/common/sharding/placement.py",  # LayerSharding.compiles
    )

    strangers = []
    for path in CODE:
        name = str(path.relative_to(ROOT))
        if asks.search(path.read_text()) and not name.startswith(allowed):
            strangers.append(name)

    assert strangers == []


# ---- one shape of all scripts --------------------------------------------------------------------
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)

# The names of a script, in this order.
CONTRACT = [
    "Config",
    "learning_rate",
    "validate",
    "open_data",
    "build",
    "train_step",
    "eval_step",
    "check_evaluation",
    "evaluate",
    "export",
    "open_evaluation",
    "evaluate_run",
    "headline",
    "main",
]

ARGUMENTS_OF = {
    "validate": ["config"],
    "open_data": ["config"],
    "build": ["config", "data", "mesh"],
    "main": ["config"],
    "train_step": ["state", "batch", "config", "mesh"],
    "eval_step": ["state", "batch", "config", "mesh"],
    "check_evaluation": ["data", "config", "mesh"],
    "evaluate_run": ["config", "mesh"],
}
# Of these the first arguments are the same; a script may have more.
FIRST_ARGUMENTS_OF = {
    "export": ["folder", "state", "data", "config", "mesh"],
    "open_evaluation": ["config"],
    "headline": ["config", "data"],
}


def definitions(script: Path) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Returns a script's classes and functions by name, in order."""
    found = {}
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
    return found


@every_script
def test_a_script_has_the_same_names_in_the_same_order(script):
    names = [name for name in definitions(script) if name in CONTRACT]
    assert names == CONTRACT
    assert ast.get_docstring(ast.parse(script.read_text()))


@every_script
def test_functions_of_a_script_take_the_same_arguments(script):
    defined = definitions(script)
    for name, expected in ARGUMENTS_OF.items():
        arguments = [argument.arg for argument in defined[name].args.args]
        assert arguments == expected, name
    for name, expected in FIRST_ARGUMENTS_OF.items():
        arguments = [argument.arg for argument in defined[name].args.args]
        assert arguments[: len(expected)] == expected, name


BLOCKS_OF_MAIN = ["the data", "the run's folder", "the model and its steps", "the loop", "the end"]


@every_script
def test_main_of_a_script_has_the_same_blocks(script):
    main = definitions(script)["main"]
    lines = script.read_text().splitlines()[main.lineno - 1 : main.end_lineno]
    found = re.findall(r"^ +# ---- (.+?) -+$", "\n".join(lines), re.MULTILINE)
    assert found == BLOCKS_OF_MAIN


@every_script
def test_data_and_state_of_a_script_have_the_same_fields(script):
    module = importlib.import_module(f"train.{script.stem}")
    assert {"train", "eval"} <= set(module.Data._fields)
    assert {"model", "optimizer"} <= set(module.State._fields)


@every_script
def test_a_config_is_frozen_and_tiny_is_one(script):
    module = importlib.import_module(f"train.{script.stem}")
    assert module.Config.__dataclass_params__.frozen
    assert isinstance(module.TINY, module.Config)


@every_script
def test_every_field_of_a_config_has_a_comment(script):
    lines = script.read_text().splitlines()
    for field in definitions(script)["Config"].body:
        if isinstance(field, ast.AnnAssign):
            line = lines[field.lineno - 1]
            assert "  # " in line, f"{field.target.id} has no comment: --help shows it"


DOCUMENTED_BY_DEVICE = ("backend.py", "eager.py")


def test_public_functions_have_docstrings():
    for path in CODE:
        package = path.relative_to(ROOT).parts[0]
        if package not in ("train", "models", "data") or path.name in DOCUMENTED_BY_DEVICE:
            continue
        for name, node in definitions(path).items():
            # Each field of a Config has a comment instead.
            if not name.startswith(("_", "Config")):
                assert ast.get_docstring(node), f"{path.name}: {name}"


# ---- tests ---------------------------------------------------------------------------------------
every_file_of_tests = pytest.mark.parametrize(
    "path", sorted((ROOT / "tests").glob("*.py")), ids=lambda path: path.name
)


@every_file_of_tests
def test_the_name_of_a_test_has_at_most_60_letters(path):
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            names.append(node.name)

    assert [name for name in names if len(name) > 60] == []


@every_file_of_tests
def test_no_file_of_tests_is_imported_by_another(path):
    """What two of them need stands in a helper file beside them."""
    files = [name for name in imports(path) if name.startswith("test_")]
    assert [name for name in files if name != path.stem] == []


# ---- requirements and formatting -----------------------------------------------------------------
def test_requirements_are_pinned_and_say_why():
    for file in ROOT.glob("requirements*.txt"):
        for line in file.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[\w-]+==[\d.]+ +# .+", line), line


def test_the_small_requirements_are_lines_of_the_whole():
    whole = (ROOT / "requirements.txt").read_text().splitlines()
    lines = (ROOT / "requirements-eager.txt").read_text().splitlines()
    small = [line for line in lines if line[0] != "#"]

    assert small == [line for line in whole if line in small]
    assert not any(line.startswith("torch_xla") for line in small)


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_lint(command):
    ruff = [sys.executable, "-m", "ruff", *command, "."]
    result = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


# ---- pages ---------------------------------------------------------------------------------------
def commands(page: Path) -> list[str]:
    """Returns the make and python commands of a page, in indented blocks and in code spans."""
    command = r"(?:^    |`)(?:\w+=\w+ )*(make [^`#\n]+|python -m [^`#\n]+)"
    found = re.findall(command, page.read_text(), re.MULTILINE)
    return [text.rstrip() for text in found]  # spaces before a comment are no part of a command


COMMANDS = list(itertools.chain.from_iterable(map(commands, PAGES)))


def test_the_pages_have_commands_of_make_and_python():
    assert len(COMMANDS) >= 40
    assert {command.split()[0] for command in COMMANDS} == {"make", "python"}


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_of_the_pages_is_one(command):
    taken_by_the_shell = r"\\$| [<>] .*"
    program, *arguments = shlex.split(re.sub(taken_by_the_shell, "", command))

    if program == "make":
        result = make("-n", *arguments)
        assert result.returncode == 0, result.stderr
    else:
        module = ROOT / arguments[1].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()


def headings(page: Path) -> list[str]:
    """Returns the headings of a page, without marks; a code block of these pages is indented, and
    has none."""
    found = []
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE):
        without_links = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.append(without_links.replace("`", "").strip())
    return found


def anchors(page: Path) -> set[str]:
    """Returns the names that GitHub gives the headings of a page."""
    names = []
    for heading in headings(page):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        names.append(words.replace(" ", "-"))
    assert len(names) == len(set(names)), f"{page}: two headings of one name"
    return set(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if ":" in path:  # a URL
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def files_that_name_pages() -> list[Path]:
    found = [ROOT / "Makefile", ROOT / "Dockerfile", ROOT / "copy_model.py", ROOT / "errors.py"]
    found += sorted(ROOT.glob("requirements*.txt"))
    found += sorted((ROOT / "tests").glob("*.py"))
    for folder in (*FOLDERS, "copied", "docs", "examples", "notebooks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh", ".yaml", ".ipynb"):
                found.append(path)
    return found


def test_every_page_that_code_names_is_there():
    """Comments, docstrings and messages name a page as it is, or with an anchor, or with a heading
    in quotes."""
    named = r'\b((?:docs|research)/[\w/]+\.md)(?:#([\w-]+))?(?:, "([^"]+)")?'
    count = 0
    for file in files_that_name_pages():
        for name, anchor, heading in re.findall(named, file.read_text()):
            page = ROOT / name
            assert page.exists(), (file.name, name)
            if anchor:
                assert anchor in anchors(page), (file.name, name, anchor)
            if heading:
                assert heading in headings(page), (file.name, name, heading)
            count += 1
    assert count >= 40


def test_what_the_findings_name_is_in_the_code():
    text = (ROOT / "docs/tpu/findings.md").read_text()
    mentions = re.findall(r"((?:`\w+`, )*`\w+`) in ([\w/]+\.py)", text)
    assert len(mentions) >= 20
    for names, path in mentions:
        for name in re.findall(r"\w+", names):
            defined = rf"^ *(def|class) {name}\b|^{name} = "
            assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE), (name, path)


# ---- versions and citing -------------------------------------------------------------------------
# Of the Citation File Format 1.2.0: the keys that it needs, and all.
CITATION_NEEDS = {"authors", "cff-version", "message", "title"}
CITATION_HAS = {
    *CITATION_NEEDS,
    "abstract",
    "commit",
    "contact",
    "date-released",
    "doi",
    "identifiers",
    "keywords",
    "license",
    "license-url",
    "preferred-citation",
    "references",
    "repository",
    "repository-artifact",
    "repository-code",
    "type",
    "url",
    "version",
}
# Of Keep a Changelog.
KINDS_OF_CHANGES = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


@pytest.fixture
def citation() -> dict:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_citation_has_the_keys_of_its_format(citation):
    assert CITATION_NEEDS <= citation.keys() <= CITATION_HAS
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] in ("software", "dataset")
    assert citation["authors"] == [{"name": "The XLA model zoo authors"}]
    assert len(citation["keywords"]) == len(set(citation["keywords"])) > 0


def test_the_citation_names_the_license_that_is_there(citation):
    assert (ROOT / "LICENSE").exists() == ("license" in citation)


def released_versions() -> list[tuple[str, str]]:
    """Returns the versions of the changelog, newest first, each with its date."""
    text = (ROOT / "CHANGELOG.md").read_text()
    return re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", text, re.MULTILINE)


def test_the_changelog_has_the_form_of_keep_a_changelog():
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *others = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert first == "[Unreleased]"
    assert len(others) == len(released_versions()), "## [1.2.0] - 2027-01-31"

    for version in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert kinds == [kind for kind in KINDS_OF_CHANGES if kind in kinds]


def test_the_newest_version_is_the_one_to_cite(citation):
    newest = dict(released_versions()[:1])
    cited = {}
    if "version" in citation:
        cited[str(citation["version"])] = str(citation["date-released"])
    assert cited == newest


# ---- make train ----------------------------------------------------------------------------------
def in_one_line(output: str) -> str:
    """Returns a command that make prints over several lines."""
    return " ".join(output.replace("\\\n", " ").split())


def bert_command(*given: str) -> str:
    """Returns the command of `make train MODEL=bert`."""
    return in_one_line(make("-n", "train", "MODEL=bert", *given).stdout)


def test_make_explains_itself():
    assert "make train MODEL=" in make().stdout


@pytest.mark.parametrize("arguments", [[], ["MODEL=vgg"]], ids=["none", "unknown"])
def test_make_train_without_a_known_model_lists_the_models(arguments):
    result = make("train", *arguments)
    assert result.returncode != 0
    assert "MODEL is one of: resnet50" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["MODEL=resnet50", "DATA=/a b"], 'train.resnet50 full  --data "$DATA" '),
        (["MODEL=resnet50"], "train.resnet50 tiny"),
        (["MODEL=dlrm", "DATA=/clicks"], 'train.dlrm   --data "$DATA"'),
        (["MODEL=dlrm", "DATA=/clicks", "PRESET=mlperf_v2"], "train.dlrm mlperf_v2"),
    ],
)
def test_make_train_chooses_a_preset(arguments, command):
    assert command in make("-n", "train", *arguments).stdout


def test_make_train_hands_its_arguments_to_the_launcher():
    given = ["TASK=mrpc", "DATA=/a b", "TPU=my-tpu", "ZONE=z", "RUN=first"]
    given += ["ENV=A=b", "RETRIES=2", "LAUNCH_ARGS=--port 1"]

    command = bert_command(*given)

    of_launcher = '--tpu "$TPU" --zone "$ZONE" --run "$RUN" --env-from ENV --retries "$RETRIES"'
    assert f"tpu.launch train {of_launcher}" in command
    of_run = '"MODEL=$MODEL" "TASK=$TASK" "DATA=$DATA" "PYTHON=$PYTHON"'
    assert command.endswith(f'--retries "$RETRIES" --port 1 -- {of_run}')


def test_make_train_with_tpu_local_trains_here():
    assert "train.resnet50 tiny" in make("-n", "train", "MODEL=resnet50", "TPU=local").stdout


def test_make_logs_needs_a_tpu():
    result = make("logs")
    assert result.returncode == 2
    assert "TPU is missing" in result.stderr


def test_make_train_hands_its_arguments_to_sky():
    command = bert_command("ENGINE=sky", "BUCKET=gs://b", "RUN=first", "PRESET=tiny", "DATA=/a b")
    assert command.endswith('--env "MODEL=$MODEL" --env "PRESET=$PRESET" --env "DATA=$DATA"')


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [([], "needs BUCKET="), (["RETRIES=2"], "takes MODEL TASK PRESET")],
    ids=["bucket", "retries"],
)
def test_what_sky_cannot_use_is_refused(arguments, reason):
    assert reason in make("train", "MODEL=bert", "ENGINE=sky", *arguments).stderr


# ---- make and the shell's variables --------------------------------------------------------------
def test_what_shells_often_have_set_is_not_taken(monkeypatch):
    monkeypatch.setenv("NAME", "me")
    monkeypatch.setenv("ENV", "production")
    monkeypatch.setenv("DATA", "/a b")

    on_tpu = bert_command("TPU=my-tpu")
    assert on_tpu.endswith('--tpu "$TPU" -- "MODEL=$MODEL" "PYTHON=$PYTHON"')
    here = bert_command()
    assert "--data" not in here
    assert "--name" not in here


# Of the Makefile's variables those that a user gives: its own help names them, PYTHON aside.
ARGUMENTS = (
    "VENV",
    "DATA",
    "PRESET",
    "MODEL",
    "TASK",
    "DEVICE",
    "OUT",
    "NAME",
    "TPU",
    "RUNS",
    "ARGS",
    "TO",
    "WITH",
)


def set_arguments_in_the_shell(monkeypatch) -> None:
    for name in ARGUMENTS:
        monkeypatch.setenv(name, "/somewhere/else")


@pytest.fixture
def full_shell(monkeypatch) -> None:
    """A shell that has a variable of the name of each argument."""
    set_arguments_in_the_shell(monkeypatch)


FOR_TRAIN = ["MODEL=bert", "TASK=mrpc"]
FOR_OTHERS = [
    *FOR_TRAIN,
    "DATASET=text",
    "DATA=/d",
    "TO=/t",
    "BENCH=goodput",
    "MODEL_DIR=/e",
    "TPU=t",
]
OTHER_TARGETS = (
    "data",
    "grid",
    "copy",
    "doctor",
    "board",
    "bench",
    "translate",
    "predict",
    "compile",
    "logs",
    "clean",
)


@pytest.mark.parametrize("target", ["train", *OTHER_TARGETS])
def test_no_variable_of_the_shell_is_an_argument_of_make(target, monkeypatch):
    given = FOR_TRAIN if target == "train" else FOR_OTHERS
    expected = make("-n", target, *given).stdout

    set_arguments_in_the_shell(monkeypatch)

    assert make("-n", target, *given).stdout == expected


def test_make_notes_what_it_does_not_take_from_the_shell(full_shell):
    (note,) = make("-n", "train", "MODEL=bert").stderr.splitlines()
    assert note.startswith("note: not taken from the environment: ")
    assert "VENV" in note
    assert "DATA" in note
    assert "MODEL " not in note, "it is an argument here"


def test_make_misses_an_argument_that_only_the_shell_has(full_shell):
    result = make("data", "DATASET=text")
    assert result.returncode == 2
    assert "DATA is missing" in result.stderr


def test_make_e_is_refused(full_shell):
    result = make("-e", "clean")
    assert result.returncode == 2
    assert "leave out -e" in result.stderr


def test_a_name_made_up_of_an_argument_is_not_taken(full_shell, monkeypatch):
    monkeypatch.setenv("PRESET_bert", "lamb")
    assert "train.glue full" in make("-n", "train", "MODEL=bert", "DATA=/glue").stdout


def test_the_makefile_is_one_for_the_make_of_a_mac():
    """GNU make 3.81, from which runs are started on a TPU: at what came later it stops with
    "missing separator". Reading a file by $(file …), which it takes for an empty variable, matters
    where something is installed, on Linux.
    """
    text = (ROOT / "Makefile").read_text()
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    newer = r"\bundefine\b|^\s*private\b|\.ONESHELL|\.SHELLFLAGS|\.RECIPEPREFIX|^\w+\s*(?:!=|::=)"
    newer += r"|\$\(file >|\$\(let |\$\(intcmp "
    assert re.findall(newer, code, re.MULTILINE) == []


# ---- make clean ----------------------------------------------------------------------------------
@pytest.fixture
def clean(tmp_path, monkeypatch) -> Callable[..., str]:
    """clean("VENV=mine"): runs `make clean` in a copy of the project that has environments of all
    kinds; returns its standard error. The shell has VENV=made."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    of_the_project = (*FOLDERS, "docs", "examples", "copied", "tests")
    for name in (*of_the_project, "mine", "linked", "runs"):
        (tmp_path / name / "__pycache__").mkdir(parents=True)
        (tmp_path / name / "__pycache__/a.cpython-311.pyc").touch()
    (tmp_path / "data/__pycache__/kept.txt").touch()

    (tmp_path / ".venv").symlink_to("linked")
    by_make = ("made/.made-by-make", ".venv-board/.made-by-make", ".venv-jax/.installed")
    for name in (*by_make, "mine/.installed"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    monkeypatch.delenv("MAKEFLAGS", raising=False)
    monkeypatch.delenv("MAKELEVEL", raising=False)
    monkeypatch.setenv("VENV", "made")

    def run(*arguments: str) -> str:
        command = ["make", "clean", *arguments]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stderr

    return run


def test_make_clean_removes_only_what_make_has_made(clean, tmp_path):
    assert "kept .venv: it is a link" in clean()
    assert "kept mine: make has not made it" in clean("VENV=mine")

    left = {path.name for path in tmp_path.iterdir()}
    assert {"made", "mine", "linked", ".venv", "runs"} <= left
    assert not {".venv-jax", ".venv-board"} & left
    assert not list(tmp_path.glob("train/*"))
    assert [path.name for path in tmp_path.glob("data/*/*")] == ["kept.txt"]
    assert list(tmp_path.glob("mine/*/*.pyc"))
    assert list(tmp_path.glob("runs/*/*.pyc"))


def test_make_clean_removes_the_environment_that_is_named(clean, tmp_path):
    clean("VENV=made")
    assert not (tmp_path / "made").exists()


# ---- make install, devices and data --------------------------------------------------------------
def test_a_new_environment_has_makes_mark_before_all_else(tmp_path):
    """And one that was there has none. The stand-in for Python makes no environment."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in -c*|"-m tpu.libpython") ;; *) exit 3 ;; esac\n')
    python.chmod(0o755)
    (tmp_path / "mine").mkdir()

    for name in ("new", "mine"):
        result = make("install", f"VENV={tmp_path}/{name}", f"PYTHON={python}")
        assert result.returncode == 2

    assert (tmp_path / "new/.made-by-make").exists()
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize(
    ("target", "takes_it"),
    [
        ("train", True),
        ("grid", True),
        ("translate", True),
        ("predict", True),
        ("compile", False),
        ("lint", False),
    ],
)
def test_make_takes_a_device_where_it_means_something(target, takes_it):
    variables = make("-pn", target, "MODEL=dlrm", "MODEL_DIR=x", "DATA=y", "DEVICE=cpu").stdout
    assert ("\nEAGER := cpu\n" in variables) == takes_it


def test_make_translate_hands_its_device_over():
    command = make("-n", "translate", "MODEL_DIR=x", "DEVICE=cpu").stdout
    assert '--model-dir "$MODEL_DIR" --device "$DEVICE"' in command


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["install", "DEVICE=gpu"], "DEVICE=gpu is not known"),
        (["train", "MODEL=dlrm", "DEVICE=cpu", "TPU=my-tpu"], "not on TPU=my-tpu"),
    ],
    ids=["unknown", "on a TPU"],
)
def test_a_device_that_cannot_be_used_is_refused(arguments, reason):
    result = make(*arguments)
    assert result.returncode == 2
    assert reason in result.stderr


PYTHONS = ("python3.11", "python3.12", "python3.13")


@pytest.fixture(
    params=[
        pytest.param((127, 1, 0), id="python3.13"),  # 1: as pyenv's, without that version
        pytest.param((127, 0, 127), id="python3.12"),  # 127: not there
    ]
)
def working_python(request, tmp_path, monkeypatch) -> str:
    """Puts stand-ins on PATH that end with these exit codes; returns the one that works."""
    for name, code in zip(PYTHONS, request.param, strict=True):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return PYTHONS[request.param.index(0)]


def test_make_takes_the_first_python_that_works(working_python, tmp_path):
    printed = make("-n", "install", f"VENV={tmp_path}/new", python="").stdout
    assert f"\n{working_python} -m venv {tmp_path}/new\n" in printed


def test_make_refuses_a_python_that_is_none(working_python, tmp_path):
    result = make("install", f"VENV={tmp_path}/new", "PYTHON=false")
    assert result.returncode == 2
    assert "3.13 is needed, false is not it; use PYTHON=" in result.stderr


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [("imagenet", "of: clicks criteo images text"), ("criteo", "DATA is missing")],
)
def test_make_data_refuses_what_it_cannot_prepare(dataset, reason):
    result = make("data", f"DATASET={dataset}")
    assert result.returncode != 0
    assert reason in result.stderr


def test_make_data_prepares_a_folder():
    command = make("-n", "data", "DATASET=criteo", "DATA=/a b", "OUT=/c d").stdout
    assert '-m data.prepare.criteo --data "$DATA" --out "$OUT"' in command


# ---- continuous integration ----------------------------------------------------------------------
def test_the_workflow_runs_ci_on_every_python_that_make_takes():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["ci"]
    makefile = (ROOT / "Makefile").read_text()
    pythons = re.search(r"for python in (python3[^;]+);", makefile)[1].split()

    versions = job["strategy"]["matrix"]["python"]
    assert [f"python{version}" for version in versions] == pythons
    last_step = job["steps"][-1]
    assert last_step["run"] == "bash .ci/run"
    assert last_step["env"] == {"PYTHON": "python${{ matrix.python }}"}


MAKE_THAT_TESTS = """#!/bin/sh
echo 7 passed in 1.5s '(0:00:01)'; [ $1 = guards ] && echo 3 passed in 2s
[ "$1" != "{failing}" ]
"""


@pytest.mark.parametrize("failing", ["", "test", "guards"])
def test_ci_runs_the_tests_and_the_guards(failing, tmp_path):
    """With a `make` that stands in for both: both run, each last line is shown, and one that fails
    is enough."""
    fake = tmp_path / "make"
    fake.write_text(MAKE_THAT_TESTS.format(failing=failing))
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    result = subprocess.run([ROOT / ".ci/run"], env=environment, capture_output=True, text=True)

    last_lines = result.stdout.splitlines()[-2:]
    assert last_lines == ["7 passed in 1.5s (0:00:01)", "3 passed in 2s"]
    succeeded = result.returncode == 0
    assert succeeded == (not failing), result.stdout + result.stderr
