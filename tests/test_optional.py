"""What a copy or an installation may come without: optional.py, which `make copy` and the messages
read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import copy_model
import optional
from errors import InputError

ROOT = Path(__file__).parent.parent
OF_ENCODERS = [optional.encoder(name) for name in optional.ENCODERS]
# A script, and a model of it.
SCRIPTS = {
    "resnet50": "resnet50",
    "dlrm": "dlrm",
    "transformer": "transformer",
    "glue": "bert",
    "pretrain": "bert",
    "squad": "bert",
    "tagging": "bert",
}
OF_THE_PROJECT = [part for part in optional.PARTS if part.given]


def name_of(part: optional.Part) -> str:
    return part.name


def test_every_part_has_a_name_of_its_own():
    names = [*optional.ENCODERS, *(part.name for part in optional.PARTS)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("part", [*OF_THE_PROJECT, *OF_ENCODERS], ids=name_of)
def test_every_module_of_a_part_is_here(part):
    for module in part.modules:
        if module != "torch_xla":
            assert copy_model.module_file(module, ROOT).exists(), module
    assert part.has(part.loaded())
    assert optional.is_here(part.name)


@pytest.mark.parametrize("part", [*optional.PARTS, *OF_ENCODERS], ids=name_of)
def test_a_missing_part_is_one_sentence_with_its_remedy(part, monkeypatch):
    monkeypatch.setitem(sys.modules, part.loaded(), None)  # import_module says it is not there

    with pytest.raises(InputError) as refused:
        optional.load(part.name, asked="cuda")

    sentence = str(refused.value)
    assert "{" not in sentence
    if part.missing == optional.NOT_IN_THIS_COPY:
        remedy = f"make copy … {part.given[0]} brings it"
        assert f"needs {part.loaded()}, not in this copy: {remedy}" in sentence
    elif part.missing == optional.NO_DEVICE:
        remedy = "install requirements.txt, copy with DEVICE=cuda, or"
        assert re.search(f"--device is cuda, but .*{remedy}", sentence)


def test_a_part_that_is_here_but_broken_keeps_its_own_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # which data.hub_images needs
    monkeypatch.delitem(sys.modules, "data.hub_images", raising=False)
    with pytest.raises(ModuleNotFoundError, match="datasets"):
        optional.load("hub_images", asked="uoft-cs/cifar10")


def test_a_folder_of_its_name_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # as its own runs leave one
    monkeypatch.syspath_prepend(tmp_path)
    # The folder is imported as a module: what stands here makes monkeypatch take it out again.
    monkeypatch.setitem(sys.modules, "wandb", None)
    del sys.modules["wandb"]
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    reason = "--tracker is wandb, but its library is not here .cannot import name 'init'"
    with pytest.raises(InputError, match=reason):
        optional.load("wandb")


def modules_of(files: list[Path]) -> set[str]:
    """Returns the dotted names of the modules in these files."""
    found = set()
    for file in files:
        name = ".".join(file.with_suffix("").parts)
        found.add(name.removesuffix(".__init__"))
    return found


def assert_parts(script: str, model: str, device: str, extras: list[str]) -> None:
    """Asserts that a copy has the parts that are asked for, and nothing of the others."""
    given = {f"MODEL={model}", f"SCRIPT={script}", f"DEVICE={device}"}
    given |= {f"WITH={name}" for name in extras}
    files, others = copy_model.needed(script, model, device, extras)
    copied = modules_of(files) | others

    wanted = optional.in_copy(given)
    for part in optional.PARTS:
        own = {module for module in copied if part.has(module)}
        if part in wanted:
            assert part.loaded() in own, part.name
        else:
            assert own == set(), part.name


@pytest.mark.parametrize("model", copy_model.SCRIPTS)
def test_a_copy_has_a_part_only_where_it_is_asked_for(model):
    scripts = [copy_model.SCRIPTS[model]]
    if model in copy_model.ENCODERS:
        scripts += copy_model.SCRIPTS_OF_TASKS.values()

    for script in scripts:
        assert_parts(script, model, device="xla", extras=[])
        assert_parts(script, model, device="cpu", extras=optional.names("WITH"))


@pytest.mark.parametrize("page", ["README.md", "Makefile"])
def test_pages_name_what_a_copy_can_have(page):
    given = f'WITH="{" ".join(optional.names("WITH"))}"'
    assert given in (ROOT / page).read_text()


@pytest.mark.parametrize("name", optional.names("WITH"))
def test_the_readme_says_what_each_of_with_gives(name):
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = optional.gives(f"WITH={name}")
    assert f"* `{name}`: {said}" in readme


def test_what_is_of_use_for_images_alone_is_loaded_there_alone():
    for name in ("hub_images", "shards"):
        loading = f'optional.load("{name}"'
        for script, model in SCRIPTS.items():
            files, _ = copy_model.needed(script, model)
            texts = [(ROOT / file).read_text() for file in files]
            is_used = any(loading in text for text in texts)
            assert optional.of_use(f"WITH={name}", script) == is_used, (name, script)


def test_sharding_is_of_use_for_the_scripts_with_its_flags():
    for script in SCRIPTS:
        has_flags = "layout: Layout" in (ROOT / f"train/{script}.py").read_text()
        assert optional.of_use("WITH=sharding", script) == has_flags, script


def test_help_names_what_a_copy_can_have():
    command = [sys.executable, "-S", "copy_model.py", "--help"]  # without any package
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert " ".join(optional.names("WITH")) in " ".join(shown.split())


def test_nothing_else_asks_what_is_there():
    for folder in ("train", "models", "data"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "find_spec(" not in path.read_text(), path
