"""What a copy or an installation may come without: optional.py, which `make copy` and the messages read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import copy_model
import optional
from errors import InputError

ROOT = Path(__file__).parent.parent
OF_THE_PROJECT = [part for part in optional.PARTS if part.given]


def test_every_module_of_a_part_is_here_and_its_name_is_its_own():
    names = [*optional.ENCODERS, *(part.name for part in optional.PARTS)]
    assert len(set(names)) == len(names)
    for part in (*OF_THE_PROJECT, *map(optional.encoder, optional.ENCODERS)):
        own = [module for module in part.modules if module != "torch_xla"]
        for module in own:
            assert copy_model.module_file(module, ROOT).exists(), module
        assert part.has(part.loaded()) and optional.is_here(part.name), part.name


@pytest.mark.parametrize(
    "part", [*optional.PARTS, *map(optional.encoder, optional.ENCODERS)], ids=lambda part: part.name
)
def test_a_missing_part_is_one_sentence_with_its_remedy(part, monkeypatch):
    monkeypatch.setitem(sys.modules, part.loaded(), None)  # import_module says that it is not there
    with pytest.raises(InputError) as refused:
        optional.load(part.name, asked="cuda")
    sentence = str(refused.value)
    assert "{" not in sentence
    if part.missing == optional.NOT_IN_THIS_COPY:
        assert f"needs {part.loaded()}, not in this copy: make copy … {part.given[0]} brings it" in sentence
    elif part.missing == optional.NO_DEVICE:
        assert re.search("--device is cuda, but .*install requirements.txt, copy with DEVICE=cuda, or", sentence)


def test_a_part_that_is_here_but_broken_keeps_its_own_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # which data.hub_images needs
    monkeypatch.delitem(sys.modules, "data.hub_images", raising=False)
    with pytest.raises(ModuleNotFoundError, match="datasets"):
        optional.load("hub_images", asked="uoft-cs/cifar10")


def test_a_folder_of_its_name_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # as its own runs leave one
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(InputError, match="--tracker is wandb, but its library is not here .cannot import name 'init'"):
        optional.load("wandb")


def names_of(files: list[Path]) -> set[str]:
    """Returns the dotted names of modules."""
    return {".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files}


@pytest.mark.parametrize("model", copy_model.SCRIPTS)
def test_a_copy_has_a_part_only_where_it_is_asked_for(model):
    scripts = [copy_model.SCRIPTS[model]]
    if model in copy_model.ENCODERS:
        scripts.append("pretrain")
    for script in scripts:
        for device, extras in (("xla", []), ("cpu", optional.names("WITH"))):
            given = {f"MODEL={model}", f"DEVICE={device}", *(f"WITH={name}" for name in extras)}
            files, others = copy_model.needed(script, model, device, extras)
            copied = names_of(files) | others
            for part in optional.PARTS:
                own = {name for name in copied if part.has(name)}
                if part in optional.in_copy(given):
                    assert part.loaded() in own, (script, device, part.name)
                else:
                    assert own == set(), (script, device, part.name)


def test_help_and_readme_name_what_a_copy_can_have():
    given = f'WITH="{" ".join(optional.names("WITH"))}"'
    assert given in (ROOT / "README.md").read_text() and given in (ROOT / "Makefile").read_text()
    command = [sys.executable, "-S", "copy_model.py", "--help"]  # without any package
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert " ".join(optional.names("WITH")) in " ".join(shown.split())


def test_nothing_else_asks_what_is_there():
    for folder in ("train", "models", "data"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert "find_spec(" not in text, path
