"""The files of research/results: one record a line, only what is read, and the pages that are
written from them."""

import json
import sys

import pytest

from research import forms, jax_peers, tpu_cycles
from tpu.compiler import pages, results, versions

FILES = sorted(path.stem for path in results.FOLDER.iterdir())
FIELDS = {
    **pages.FIELDS,
    "stock": tpu_cycles.READ_OF_STOCK,
    "generations": tpu_cycles.READ,
    "stock_tpu_vm": tpu_cycles.READ_OF_TPU_VMS,
    "jax": jax_peers.READ,
    "forms": forms.READ,
}


def load(name: str) -> dict:
    return results.load(results.FOLDER / f"{name}.json")


def records(figures: dict) -> list[dict]:
    """Returns the records of a file, whatever its groups."""
    if not all(isinstance(entry, dict) for entry in figures.values()):
        return [figures]
    found = []
    for entry in figures.values():
        found += records(entry)
    return found


def test_every_file_has_a_tool_that_writes_it():
    assert sorted([*FIELDS, "versions"]) == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_its_tool_would_write(name, tmp_path):
    path = results.FOLDER / f"{name}.json"
    results.save(tmp_path / "again.json", results.load(path))
    assert (tmp_path / "again.json").read_text() == path.read_text()


@pytest.mark.parametrize("name", FIELDS)
def test_a_record_has_only_what_something_reads(name):
    for each in records(load(name)):
        assert results.record(each, FIELDS[name]) == each


# What a command line of tpu_cycles.py asks for


@pytest.fixture
def on_tpu_vms(monkeypatch, tmp_path):
    """Runs the command with --on-tpu-vms, without a compiler and without figures; returns what it
    has compiled."""
    compiled = []

    def measure(row, _topology):
        compiled.append(row.name)
        return {"cycles": 1}

    def run(*flags: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["tpu_cycles", "--on-tpu-vms", *flags])
        tpu_cycles.main()
        return compiled

    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(tpu_cycles, "measure_on_tpu_vms", measure)
    monkeypatch.setattr(versions, "write_page", lambda: None)
    return run


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["nonsense"], "no row has 'nonsense' in its name"),
        (["nonsense", "--stale"], "no row has 'nonsense' in its name"),
        (["resnet", "--generation", "v6e"], "leave --generation and --only out"),
        (["resnet", "--only", "ours"], "leave --generation and --only out"),
    ],
)
def test_flags_that_do_nothing_on_tpu_vms_are_refused(flags, said, on_tpu_vms, capsys):
    with pytest.raises(SystemExit):
        on_tpu_vms(*flags)
    assert said in capsys.readouterr().err


def test_print_compiles_nothing_on_tpu_vms(on_tpu_vms):
    assert on_tpu_vms("resnet", "--print") == []
    assert on_tpu_vms("resnet") == ["ResNet-50, 224 px"]


@pytest.mark.parametrize("flags", [["--stale"], ["--stale", "--missing"]])
def test_stale_names_the_rows_without_figures(flags, on_tpu_vms, capsys):
    assert on_tpu_vms("resnet", *flags) == []
    assert capsys.readouterr().out == "ResNet-50, 224 px: no figures yet\n"


# The order of a file


@pytest.mark.parametrize("part", pages.PARTS)
def test_the_order_of_a_part_is_that_of_its_table(part):
    figures = load(part)
    assert json.dumps(pages.arranged(part, figures)) == json.dumps(figures)


@pytest.mark.parametrize(
    ("name", "arranged"), [("jax", jax_peers.arranged), ("forms", forms.arranged)]
)
def test_the_order_of_a_tools_file_is_that_of_its_table(name, arranged):
    assert json.dumps(arranged(load(name))) == json.dumps(load(name))


def test_the_order_of_figures_of_stock_is_that_of_their_table():
    names = tpu_cycles.names_of(tpu_cycles.STEPS + tpu_cycles.TABLES)
    assert [*load("stock")] == names
    assert [*load("stock_tpu_vm")] == [name for name in names if name in load("stock_tpu_vm")]


def test_the_order_of_generations_is_that_of_the_chips():
    assert [*load("generations")] == [*tpu_cycles.CHIPS]


def test_the_order_of_versions_is_that_of_their_cases():
    figures = load("versions")
    assert [*figures] == [name for name in versions.NAMES if name in figures]


# The pages


PAGES = {  # of docs/tpu; versions.md is tests/test_versions.py's
    "README": pages.text_of_page,
    "stock": lambda: tpu_cycles.page(load("stock")),
    "generations": lambda: tpu_cycles.generations_page(load("generations")),
    "jax": lambda: jax_peers.page(load("jax"), load("stock")),
    "forms": lambda: forms.page(load("forms")),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_what_the_figures_say(name):
    text = PAGES[name]()
    again = f"write docs/tpu/{name}.md again: --print"
    assert (pages.DOCS / f"{name}.md").read_text() == text, again


# Reading and writing


def test_a_record_is_one_line_and_its_entries_are_sorted(tmp_path):
    path = tmp_path / "results" / "figures.json"
    assert results.load(path) == {}
    figures = {
        "second": {"v5e": {"b": 1, "a": {"n": 2}}},
        "first": {"v4": {"fits": False}, "v5p": {"c": {}, "d": 1}},
    }
    results.save(path, figures)
    assert path.read_text().splitlines() == [
        "{",
        ' "second": {',
        '  "v5e": {"a": {"n": 2}, "b": 1}',
        " },",
        ' "first": {',
        '  "v4": {"fits": false},',
        '  "v5p": {"c": {}, "d": 1}',
        " }",
        "}",
    ]
    assert results.load(path) == figures


def test_figures_are_saved_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results" / "figures.json"
    results.save(path, {"a": 1})
    with pytest.raises(TypeError):
        results.save(path, {"a": object()})
    assert results.load(path) == {"a": 1}
    assert [each.name for each in path.parent.iterdir()] == ["figures.json"]


def test_a_record_has_the_named_entries_that_are_there():
    report = {
        "memory": {"needed": 1, "peak": 2},
        "collectives": {"all-reduce": {"count": 3, "bytes": 4}},
        "what": "",
    }
    fields = ("memory.needed", "collectives.*.count", "uncounted.bundles", "cycles")

    expected = {"memory": {"needed": 1}, "collectives": {"all-reduce": {"count": 3}}}
    assert results.record(report, fields) == expected
    assert results.record({"collectives": {}}, fields) == {"collectives": {}}


def test_entries_follow_the_table_and_others_come_last():
    entries = {"z": 1, "b": 2, "a": 3, "y": 4}
    assert [*results.in_order(entries, ["a", "c", "b"])] == ["a", "b", "y", "z"]
