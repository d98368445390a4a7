"""What the three preparations have in common: plan, passes, resume, report, command line (data/prepare/pipeline.py)."""

import functools
import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import fsspec
import pytest
from corpora import contents, documents, pair_corpus, text_corpus, written
from criteo_text import random_rows, write

from data import remote
from data.criteo import open_clicks
from data.prepare import criteo, pipeline, text, wmt
from data.remote import local_copy
from data.text import open_text
from data.wmt import open_pairs
from errors import InputError

ROOT = Path(__file__).parent.parent


def write_clicks(folder: Path, end: str) -> None:
    """Packs the second of three days."""
    for day in range(3):
        write(folder / f"day_{day}{end if day == 1 else ''}", random_rows(70, day))


class Program(NamedTuple):
    module: ModuleType
    write: Callable[[Path, str], object]  # writes the text to a folder; with ".gz" packed
    open: Callable[[str, str], object]  # opens a split as training does
    more: tuple[str, bytes]  # file to append, and what
    size: tuple[str, int, int]  # setting for chunks, small and smaller
    any_size: bool  # chunks of any size give the same result
    flags: dict
    passes: list[tuple[str, int]]  # functions, and their call that is interrupted
    kills: tuple[int, ...]  # calls of np.savez that end in SIGKILL, one after another
    summary: str
    refused: dict[str, dict]  # messages, and the flags that cause them


PROGRAMS = {
    "criteo": Program(
        criteo,
        write_clicks,
        open_clicks,
        ("day_0", random_rows(1, 9)[0] + b"\n"),
        ("CHUNK_BYTES", 5000, 3000),
        True,
        {"threshold": 2},
        [("_save_chunk", 3), ("_save_chunk", 7), ("_count", 3), ("_write", 3)],
        (3, 8, 4),  # parsing has 10 chunks, counting 26 features
        "140 training and 70 evaluation rows; ",
        {
            "--threshold is 0; expected 1": {"threshold": 0},
            "--max-rows is 2; expected 0, or 3": {"max_rows": 2},
            "--hash-rows is -1; expected 0, or 3": {"hash_rows": -1},
            "--bad-rows is 1.0; expected a share": {"bad_rows": 1.0},
            "--threshold 5 needs a vocabulary.*drop one": {"threshold": 5, "hash_rows": 100},
        },
    ),
    "text": Program(
        text,
        lambda folder, end: text_corpus(folder, end=end),
        open_text,
        ("c.txt", written(documents(2, 5))),
        ("PIECE_BYTES", 1500, 800),
        False,
        {"length": 32, "vocab_size": 300},
        [("_unpack", 2), ("learn", 1), ("_encode_piece", 2), ("_join", 2)],
        (2, 3),
        r"train: documents 120, sentences \d+, .*\nvalid: documents 8.*\n300 tokens in the vocabulary; ",
        {
            "kind is gpt2": {"kind": "gpt2"},
            "length is 4; expected 8 or more": {"length": 4},
            "pairs are for bert": {"kind": "roberta", "pairs": True},
            "--vocab-size is 200; expected at least 261 for roberta": {"kind": "roberta", "vocab_size": 200},
            "--valid-share is 1; expected a share between 0 and 1": {"valid_share": 1},
            "--sample is 0; expected at least 1": {"sample": 0},
        },
    ),
    "wmt": Program(
        wmt,
        lambda folder, end: pair_corpus(folder, end=end),
        open_pairs,
        ("train.en", b"more\n"),
        ("CHUNK_LINES", 13, 8),
        True,
        {"vocabulary": 160},
        [
            *(("_unpack", 2), ("_cut", 2), ("_clean_chunk", 2), ("_find_duplicates", 1)),
            *(("learn_bpe", 1), ("_encode_chunk", 2), ("_join", 2), ("write_mmap", 2)),
        ],
        (3, 4, 2),  # cleaning has 5 chunks, and so has encoding
        "60 training pairs read; dropped: none\ntokens: .*\ntokens per word: .*\n60 training pairs, 7 valid; 160 sym",
        {
            "--source is e n; expected a language": {"source": "e n"},
            "--target is de; expected another language": {"source": "de"},
            "--vocabulary is 99; expected 100 to": {"vocabulary": 99},
            "--vocabulary 100 is too small for the text; expected .* 10[0-9] characters": {"vocabulary": 100},
            "--max-tokens is 0; expected 1 to": {"max_tokens": 0},
            "--sample is 0; expected 1 to": {"sample": 0},
            "--ratio is 0.5; expected at least 1": {"ratio": 0.5},
            "--letters is 1.1; expected a share": {"letters": 1.1},
            "--coverage is -0.1; expected a share": {"coverage": -0.1},
            r"has no newstest2019\.en .* for the valid split": {"valid": "newstest2019"},
        },
    ),
}


class Made:
    """What a program makes of packed text in small chunks, and how often it calls each function on the way."""

    def __init__(self, program: Program, folder: Path):
        self.program, self.text, self.out = program, folder / "text", folder / "prepared"
        program.write(self.text, ".gz")
        with pytest.MonkeyPatch.context() as patch:
            calls = self.counted(patch, {})
            self.report = self.prepare(self.out)
        self.calls, self.contents = dict(calls), contents(self.out)

    def prepare(self, out: Path, size: int = 0, text: Path | None = None, **flags) -> dict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.program.module, self.program.size[0], size or self.program.size[1])
            return self.program.module.prepare(text or self.text, out, **self.program.flags | flags)

    def refuse_another_flag(self, out: Path) -> None:
        flag, value = next(iter(self.program.flags.items()))
        message = rf"{out.name} was prepared with other --{flag}: {value}, now {value + 8}; choose another --out"
        with pytest.raises(InputError, match=message):
            self.prepare(out, **{flag: value + 8})

    def counted(self, patch: pytest.MonkeyPatch, interrupted: dict[str, int]) -> Counter:
        """Counts the calls of each pass from now on; raises KeyboardInterrupt in the calls `interrupted`."""
        calls = Counter()

        def call(name: str, original: Callable, *arguments):
            calls[name] += 1
            if calls[name] == interrupted.get(name):
                raise KeyboardInterrupt
            return original(*arguments)

        for name in {name for name, _ in self.program.passes}:
            owner = self.program.module if hasattr(self.program.module, name) else pipeline
            patch.setattr(owner, name, functools.partial(call, name, getattr(owner, name)))
        return calls


@pytest.fixture(scope="module")
def made_by(tmp_path_factory) -> Callable[[str], Made]:
    return functools.cache(lambda name: Made(PROGRAMS[name], tmp_path_factory.mktemp(name)))


@pytest.fixture(params=PROGRAMS)
def made(request, made_by) -> Made:
    return made_by(request.param)


PASSES = [(name, *interrupted) for name, program in PROGRAMS.items() for interrupted in program.passes]


@pytest.mark.parametrize(("made", "function", "at"), PASSES, indirect=["made"])
def test_an_interrupted_preparation_resumes(tmp_path, monkeypatch, capsys, made, function, at):
    program, out = made.program, tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        made.counted(patch, {function: at})
        made.prepare(out)
    with pytest.raises(InputError, match="not prepared to its end"):
        program.open(str(out), "train")
    made.refuse_another_flag(out)
    calls = made.counted(monkeypatch, {})
    capsys.readouterr()
    made.prepare(out, size=program.size[2])  # the chunks that are there still fit
    assert "resuming the unfinished preparation" in capsys.readouterr().out
    done = 0 if function == "write_mmap" else at - 1  # the small splits are written anew
    assert calls[function] == made.calls[function] - done, "finished work is repeated, or unfinished work is left out"
    assert contents(out) == made.contents


def test_text_at_a_url_becomes_a_folder_at_a_url_whole_or_not_at_all(tmp_path, monkeypatch, capsys, made):
    program, bucket = made.program, fsspec.filesystem("memory")
    data, out = f"memory://{tmp_path.name}/text", f"memory://{tmp_path.name}/rows"
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(program.module, program.size[0], program.size[1])
    bucket.put(f"{made.text}/", data, recursive=True)
    flags = [word for name, value in program.flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with pytest.raises(SystemExit):
        program.module.main(["--data", data])
    assert "is a URL; name the folder or the URL of the result with --out" in capsys.readouterr().err
    command = ["--data", data, "--out", out, "--workers", "1", *flags]
    with monkeypatch.context() as patch, pytest.raises(SystemExit):  # what is uploaded last must not be there
        put, fails = bucket.put_file, lambda path, to: put(path, to) if Path(path).name in pipeline.LAST else 1 / 0
        patch.setattr(remote, "PAUSES", ())
        patch.setattr(bucket, "put_file", fails)
        program.module.main(command)
    assert "; give the same command again" in capsys.readouterr().err
    with pytest.raises(InputError, match="not prepared to its end"):
        program.open(out, "train")
    local_copy.cache_clear()
    program.module.main(command)
    assert len(program.open(out, "train")) == len(program.open(str(made.out), "train"))
    local_copy.cache_clear()
    assert contents(Path(local_copy(out))) == made.contents
    uploaded = bucket.ls(out, detail=True)
    program.module.main(command)
    assert "is already prepared" in capsys.readouterr().out and bucket.ls(out, detail=True) == uploaded
    with pytest.raises(SystemExit):
        program.module.main([*command[:-1], str(int(command[-1]) + 8)])
    assert f"{out} was prepared with other --" in capsys.readouterr().err


KILLED = """
import importlib, json, os, signal, sys
import numpy as np
write = np.savez
def prepare(name, size, value, text, out, flags, killed):
    calls = 0
    def savez(file, **arrays):
        nonlocal calls
        calls += 1
        file.write(b"half of it")
        file.flush()
        if calls == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        file.seek(0)
        write(file, **arrays)
    np.savez = savez
    module = importlib.import_module(name)
    setattr(module, size, value)
    module.prepare(text, out, **flags)
tasks = json.loads(sys.argv[1])
for name, *_ in tasks:  # once for all, with transformers
    importlib.import_module(name)
for task in tasks:
    child = os.fork()
    if child == 0:
        prepare(*task)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, task
"""


def test_kill_9_in_the_middle_of_a_file_and_start_again(tmp_path, made_by):
    """One process for all programs, since it takes seconds to import transformers."""
    tasks = []
    for name, program in PROGRAMS.items():
        task = program.module.__name__, *program.size[:2], str(made_by(name).text), str(tmp_path / name)
        tasks += [(*task, program.flags, call) for call in program.kills]
    subprocess.run([sys.executable, "-c", KILLED, json.dumps(tasks)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for name in PROGRAMS:
        out = tmp_path / name
        assert list((out / "parts").glob("*.partial")), name
        (out / "tokenizer.1.partial").mkdir()
        (out / "half.2.partial").touch()
        made_by(name).prepare(out)
        assert contents(out) == made_by(name).contents, name


def test_the_command_and_neither_workers_nor_packing_nor_the_size_of_chunks_change_the_result(
    tmp_path, monkeypatch, capsys, made
):
    def command(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["prepare", *arguments, "--workers", "1"])
        monkeypatch.delitem(sys.modules, made.program.module.__name__, raising=False)  # else runpy warns
        runpy.run_module(made.program.module.__name__, run_name="__main__")

    made.program.write(tmp_path / "plain", "")
    any_size = made.program.any_size
    made.prepare(tmp_path / "workers", text=None if any_size else tmp_path / "plain", workers=2)
    assert contents(tmp_path / "workers") == made.contents
    flags = [word for name, value in made.program.flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    capsys.readouterr()
    command("--data", str(tmp_path / "plain"), *flags, "--out", str(tmp_path / "whole"))
    assert not any_size or contents(tmp_path / "whole") == made.contents
    assert re.search(made.program.summary, capsys.readouterr().out)
    with pytest.raises(SystemExit) as stopped:
        command("--data", str(tmp_path / "nowhere"))
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    assert re.fullmatch(r"error: there is no .*nowhere; expected .*\n", printed.err)


def test_a_finished_preparation_is_not_repeated_and_other_flags_or_sources_are_refused(tmp_path, capsys, made):
    made = Made(made.program, tmp_path)
    assert made.program.open(str(made.out), "train")
    before = made.contents
    (made.out / "parts").mkdir()  # of a call that was killed at its very end
    for path in made.out.glob("*.npy"):
        path.write_bytes(b"not written again")
    with pytest.MonkeyPatch.context() as patch:
        assert made.counted(patch, {}) == {} and made.prepare(made.out) == made.report
    assert "prepared is already prepared" in capsys.readouterr().out
    assert set(contents(made.out)) == set(before) and not (made.out / "parts").exists()
    made.refuse_another_flag(made.out)
    name, more = made.program.more
    with open(next(made.text.glob(f"{name}*"), made.text / name), "ab") as file:
        file.write(more)
    message = rf"prepared with other sources: .* \(\d+ bytes\), now .*{name}\S* \(\d+ bytes\)"
    with pytest.raises(InputError, match=message):
        made.prepare(made.out)


def test_what_no_preparation_can_use_is_explained(tmp_path, made):
    refused = {"--workers is 0; expected at least 1": {"workers": 0}} | made.program.refused
    for message, flags in refused.items():
        with pytest.raises(InputError, match=message):
            made.prepare(tmp_path / "flags", **flags)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file\S* cannot be written: .*; choose another folder with --out"):
        made.prepare(tmp_path / "file")
    made.program.write(tmp_path / "text", ".gz")
    packed = next((tmp_path / "text").glob("*.gz"))
    for data, message in ((packed.read_bytes()[:-20], "ended before"), (b"text", "Not a gzipped file")):
        packed.write_bytes(data)
        with pytest.raises(InputError, match=rf"{packed.name} cannot be (read|decompressed): .*{message}"):
            made.prepare(tmp_path / message, text=tmp_path / "text")
