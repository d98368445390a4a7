"""The notebooks: what they are made of, and that they run and reach what they claim, on XLA's CPU backend.

They hold the outputs of such a run, so that a reader sees what to expect. After a change, make them anew:

    python tests/test_notebooks.py              # all, five minutes on two CPU cores; or the names of some: dlrm glue

When the repository gets its address: sed -i s,OWNER/xla-model-zoo,<owner>/<name>, notebooks/*.ipynb
"""

import fnmatch
import glob
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import IPython.core.magic
import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
# The metric that the prediction is compared with, and what it must reach: far from chance.
CLAIMS = {"resnet50": ("top1", 0.9), "glue": ("accuracy", 0.95), "transformer": ("bleu", 90), "dlrm": ("auc", 0.78)}
NAMES = pytest.mark.parametrize("name", CLAIMS)
MAGIC = "%%zoo\n"


def execute(name: str, folder: Path):
    """The notebook with the outputs of a run in `folder`. It installs nothing: the environment is this one."""
    (folder / "notebooks").mkdir()
    for part in ("train", "models", "data", "errors.py", "optional.py"):
        (folder / part).symlink_to(ROOT / part)
    (folder / ".venv").symlink_to(sys.prefix)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    options = {"timeout": 900, "kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
    options |= {"skip_cells_with_tag": "install", "resources": {"metadata": {"path": str(folder / "notebooks")}}}
    client = nbclient.NotebookClient(notebook, **options)
    client.execute(env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"})
    notebook.metadata.language_info = {"name": "python"}  # not the version of this machine's Python
    return notebook


def normalised(notebook: dict) -> str:
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def cells(name: str, kinds=("code",)) -> dict[str, str]:
    """The source of each cell of these kinds, by its id, in order."""
    return {cell["id"]: "".join(cell["source"]) for cell in read(name)["cells"] if cell["cell_type"] in kinds}


def printed(notebook: dict, cell: str) -> str:
    outputs = next(one for one in notebook["cells"] if one["id"] == cell)["outputs"]
    return "".join("".join(output.get("text", "")) for output in outputs)


def set_up(monkeypatch, folder: Path, **variables: str) -> dict:
    """The names that the set-up cell makes, in a folder that is in no clone."""
    monkeypatch.setattr(IPython.core.magic, "register_cell_magic", lambda function: function)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    (folder / "work").mkdir()
    monkeypatch.chdir(folder / "work")
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    names = {}
    exec(cells("dlrm")["set-up"], names)
    return names


@NAMES
def test_the_files_are_valid_and_normalised_and_have_one_address(name):
    text = (FOLDER / f"{name}.ipynb").read_text()
    nbformat.validate(json.loads(text))
    notebook = json.loads(text)
    assert text == normalised(notebook), "keys in another order: write it with `python tests/test_notebooks.py`"
    assert {key for cell in notebook["cells"] for key in cell["metadata"]} <= {"tags"}, "timings, or a tool's own notes"
    assert notebook["metadata"]["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    # The badge and the clone have one address.
    own, others = (cells(which, ("code", "markdown")) for which in (name, "dlrm"))
    repository, title = re.search(r'^REPOSITORY = "([\w.-]+/[\w.-]+)"', own["set-up"], re.MULTILINE)[1], own["title"]
    assert "colab-badge.svg" in title
    assert f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}.ipynb" in title
    for target in re.findall(r"\]\((\.\.[^)]+)\)", title):
        assert (FOLDER / target).exists(), target
    for part in ("set-up-text", "set-up", "install-text", "install"):  # as all notebooks have it
        assert own[part] == others[part], part


@NAMES
def test_it_installs_pins_first_and_runs_the_script_and_holds_no_training_code(name):
    notebook, parts = read(name), cells(name)
    tagged = [cell["id"] for cell in notebook["cells"] if "install" in cell["metadata"].get("tags", [])]
    assert tagged == ["install"] and list(parts)[:2] == ["set-up", "install"]
    # This notebook's own Python has whatever torch Colab or Kaggle give it.
    for own in (text for text in parts.values() if not text.startswith(MAGIC)):
        assert not re.search(r"^\s*(from|import) (torch|train|models|data|jax)", own, re.MULTILINE)
    # The pins are those of the requirements files, and nowhere else.
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        assert line.startswith("#") or line.split()[0] not in normalised(notebook)
    assert f"from train import {name}\n" in parts["train"] and parts["train"].endswith(f"\n{name}.main(config)")
    for text in parts.values():
        assert not re.search(r"\.backward\(|optimizer|torch_xla\.|import torch_xla|\.train\(\)", text)
    assert "metrics.jsonl" in parts["plot"] and f"runs/{name}-notebook/export" in parts["predict"]
    assert "\nassert " in parts["predict"]


@NAMES
def test_the_full_recipe_in_the_comment_is_one(name):
    text = cells(name)["train"].removeprefix(MAGIC)
    lines = re.findall(r"^# (config = .+)$", text, re.MULTILINE)
    assert len(lines) == 1
    names = {}
    exec(text[: text.index("config = ")] + lines[0], names)
    config = names[name].validate(names["config"])
    assert config.data not in ("", "synthetic") and config.name
    for module in re.findall(r'run\(PYTHON, "-m", "([\w.]+)"', text):
        assert importlib.util.find_spec(module), module


@NAMES
def test_outputs_are_there_and_small_and_name_no_machine(name):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < 100_000
    pictures = 0
    for cell in [cell for cell in read(name)["cells"] if cell["cell_type"] == "code"]:
        assert (cell["execution_count"] is None) == (cell["id"] == "install")
        for output in cell["outputs"]:
            assert output["output_type"] in ("stream", "display_data"), cell["id"]
            assert output.get("name", "stdout") == "stdout", cell["id"]
            pictures += "image/png" in output.get("data", {})
            text = "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
            assert not re.search(r"(^|[\s\"'(=])/\w|://|site-packages|[Ww]arning|\bpip\b", text), text
    assert pictures == 1
    assert all(printed(read(name), part) for part in ("devices", "train", "predict"))


def test_the_zoos_process_gets_no_settings_meant_for_others(monkeypatch, tmp_path):
    variables = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYTHONPATH": "/env/python"}
    variables |= {"TPU_LIBRARY_PATH": "/lib/libtpu.so", "TPU_PROCESS_ADDRESSES": "local", "PJRT_DEVICE": "TPU"}
    variables |= {"TPU_WORKER_HOSTNAMES": "WARNING: could not look up", "TPU_WORKER_ADDRS": "10.0.0.2"}
    names = set_up(monkeypatch, tmp_path, **variables)
    assert not names["CLONE"] and names["ZOO"] == tmp_path / "temporary/xla-model-zoo"
    assert names["ENVIRONMENT"]["PYTHONPATH"] == str(names["ZOO"])
    assert variables.keys() & names["ENVIRONMENT"].keys() == {"PYTHONPATH", "TPU_WORKER_ADDRS", "PJRT_DEVICE"}


@pytest.mark.parametrize("chips", [("/dev/accel0",), ("/dev/vfio/0", "/dev/vfio/1"), ()])
def test_where_there_are_chips_they_are_used_or_it_fails(monkeypatch, tmp_path, chips):
    monkeypatch.setattr(glob, "glob", lambda pattern: [chip for chip in chips if fnmatch.fnmatch(chip, pattern)])
    monkeypatch.delenv("PJRT_DEVICE")
    names = set_up(monkeypatch, tmp_path)
    assert names["ENVIRONMENT"].get("PJRT_DEVICE") == ("TPU" if chips else None)


def test_a_command_shows_what_it_prints_and_its_failure_ends_the_cell(monkeypatch, tmp_path, capsys):
    names = set_up(monkeypatch, tmp_path)
    names["run"](sys.executable, "-c", "import os, sys; print(os.environ['A']); print('b', file=sys.stderr)", A="a")
    assert capsys.readouterr().out.split() == ["a", "b"]
    with pytest.raises(SystemExit, match="exit code 3"):
        names["run"](sys.executable, "-c", "raise SystemExit(3)")
    with pytest.raises(SystemExit, match="not installed: run the cell that installs"):
        names["zoo"]("", "print(1)")
    # The stop button lets a run save.
    child = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(143)))\n"
    child += "print('begun'); time.sleep(60)"
    stop = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
    stop.start()
    with pytest.raises(SystemExit, match="exit code 143"):
        names["run"](sys.executable, "-c", child)
    stop.join()
    assert capsys.readouterr().out.split() == ["begun", "saved"]


def test_the_install_cell_clones_and_installs_with_uvs_python(monkeypatch, tmp_path):
    names = set_up(monkeypatch, tmp_path)
    with pytest.raises(SystemExit, match="REPOSITORY in the cell above is not filled in"):
        exec(cells("dlrm")["install"], names)
    commands, zoo = [], names["ZOO"]
    names["REPOSITORY"] = "someone/zoo"
    names["run"] = lambda *command, **variables: commands.append(" ".join(map(str, command)))
    found = subprocess.CompletedProcess([], 0, stdout="/uv/python3.11\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **options: found)
    exec(cells("dlrm")["install"], names)
    assert commands[0] == f"git clone --quiet --depth 1 https://github.com/someone/zoo.git {zoo}"
    assert "pip install --quiet uv==" in commands[1] and commands[2].endswith("uv python install --quiet 3.11")
    assert commands[3:] == [f"make --quiet -C {zoo} install PYTHON=/uv/python3.11"]
    commands.clear()
    (zoo / ".venv").mkdir(parents=True)
    (zoo / ".venv/.installed").touch()
    names["ENVIRONMENT"]["PJRT_DEVICE"] = "TPU"
    exec(cells("dlrm")["install"], names)
    assert commands == [f"{zoo}/.venv/bin/python -m pip install --quiet -r {zoo}/requirements-tpu.txt"]
    # One that was chosen by LIBTPU_VERSION= stays.
    commands.clear()
    (zoo / ".venv/.libtpu_version").write_text("0.0.51\n")
    exec(cells("dlrm")["install"], names)
    assert not commands


SLOW = ("glue", "resnet50", "transformer")


@pytest.mark.parametrize("name", ["dlrm", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_it_runs_and_reaches_what_it_claims(name, tmp_path):
    notebook = execute(name, tmp_path)  # an error in a cell, such as its assertion's, is raised here
    metric, least = CLAIMS[name]
    summary = json.loads((tmp_path / f"notebooks/runs/{name}-notebook/summary.json").read_text())
    assert summary["metrics"][metric] >= least
    plot = next(cell for cell in notebook["cells"] if cell["id"] == "plot")
    assert any("image/png" in output.get("data", {}) for output in plot["outputs"])
    # The outputs that the repository keeps are of this code: the same sizes, steps and number of lines.
    before = read(name)
    assert printed(notebook, "train").splitlines()[:2] == printed(before, "train").splitlines()[:2]
    for part in ("devices", "train", "predict"):
        assert len(printed(notebook, part).splitlines()) == len(printed(before, part).splitlines()), part


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CLAIMS:
        with tempfile.TemporaryDirectory() as temporary:
            executed = execute(chosen, Path(temporary))
        (FOLDER / f"{chosen}.ipynb").write_text(normalised(json.loads(json.dumps(executed))))
        print(f"notebooks/{chosen}.ipynb: {(FOLDER / f'{chosen}.ipynb').stat().st_size:,} bytes")
