"""What the three preparations have in common: plan, passes, resume, report, command line (data/prepare/pipeline.py)."""

import contextlib
import errno
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import fsspec
import pytest
from corpora import contents, pair_corpus, text_corpus
from criteo_text import random_rows, write

from data import remote
from data.criteo import open_clicks
from data.prepare import criteo, files, pipeline, text, wmt
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
    size: tuple[str, int, int]  # setting for chunks, small and smaller
    any_size: bool  # chunks of any size give the same result
    flags: dict
    summary: str
    refused: dict[str, dict]  # messages, and the flags that cause them


PROGRAMS = {
    "criteo": Program(
        criteo,
        write_clicks,
        open_clicks,
        ("CHUNK_BYTES", 5000, 3000),
        True,
        {"threshold": 2},
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
        text_corpus,
        open_text,
        ("PIECE_BYTES", 1500, 800),
        False,
        {"length": 32, "vocab_size": 300},
        r"train: documents 120, sentences \d+, .*\nvalid: documents 8.*\n300 tokens in the vocabulary; ",
        {
            "length is 4; expected 8 or more": {"length": 4},
            "--vocab-size is 200; expected at least 261 for roberta": {"kind": "roberta", "vocab_size": 200},
            "--valid-share is 1; expected a share between 0 and 1": {"valid_share": 1},
            "--sample is 0; expected at least 1": {"sample": 0},
        },
    ),
    "wmt": Program(
        wmt,
        pair_corpus,
        open_pairs,
        ("CHUNK_LINES", 13, 8),
        True,
        {"vocabulary": 160},
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
    """What a program makes of packed text in small chunks, and the files that get their names on the way."""

    def __init__(self, program: Program, folder: Path):
        self.program, self.text, self.out = program, folder / "text", folder / "prepared"
        program.write(self.text, ".gz")
        with finished_files() as self.files:
            self.report = self.prepare(self.out)
        self.contents = contents(self.out)
        self.flags = [word for name, value in program.flags.items() for word in (f"--{name.replace('_', '-')}", value)]

    def prepare(self, out: Path, size: int = 0, text: Path | None = None, **flags) -> dict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.program.module, self.program.size[0], size or self.program.size[1])
            return self.program.module.prepare(text or self.text, out, **self.program.flags | flags)

    def main(self, *arguments) -> None:
        """Runs the command line in one process, with the program's flags."""
        self.program.module.main(list(map(str, ["--workers", 1, *self.flags, *arguments])))

    def refuse_another_flag(self, out: Path) -> None:
        flag, value = next(iter(self.program.flags.items()))
        message = rf"{out.name} was prepared with other --{flag}: {value}, now {value + 8}; choose another --out"
        with pytest.raises(InputError, match=message):
            self.prepare(out, **{flag: value + 8})


@contextlib.contextmanager
def finished_files(most: int = sys.maxsize) -> Iterator[list[str]]:
    """Lists files as they get their names, which makes them finished; interrupts the call once there are `most`."""
    names = []

    def give_name(path: Path, act: Callable) -> None:
        if len(names) == most:
            raise KeyboardInterrupt
        act()
        names.append(path.name)

    replace, touch = os.replace, Path.touch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda partial, path: give_name(path, lambda: replace(partial, path)))
        patch.setattr(Path, "touch", lambda path: give_name(path, lambda: touch(path)))
        yield names


@pytest.fixture(scope="module", params=PROGRAMS)
def made(request, tmp_path_factory) -> Made:
    return Made(PROGRAMS[request.param], tmp_path_factory.mktemp(request.param))


def test_an_interrupted_preparation_resumes(tmp_path, capsys, made):
    """Each call is interrupted after three files, until one ends: every pass is resumed."""
    out, finished = tmp_path / "out", []
    for interrupted in range(30):
        size = made.program.size[2 if interrupted else 1]  # the chunks that are there still fit
        with finished_files(3) as names, contextlib.suppress(KeyboardInterrupt):
            made.prepare(out, size=size)
            break
        finished += names
        assert {path.name for path in (out / "parts").iterdir() if path.suffix != ".partial"} <= {*finished}
        (out / "tokenizer.1.partial").mkdir(exist_ok=True)  # as another process leaves them
        (out / "half.2.partial").touch()
        if not interrupted:
            with pytest.raises(InputError, match="not prepared to its end"):
                made.program.open(str(out), "train")
            made.refuse_another_flag(out)
    assert contents(out) == made.contents and not list(out.glob("*.partial"))
    assert capsys.readouterr().out.count("resuming the unfinished preparation") == interrupted > 5
    repeated = Counter(finished + names) - Counter(made.files)
    firsts = ["prepared.json", "learnt.json", "train.en-de.de.bin"]
    assert repeated <= Counter(firsts), "more than the first of two files of a task"


def test_at_a_url_only_what_make_made_is_left_out_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    bucket, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}/mine"
    report = b'{"flags": {}, "sources": []}'
    files = {"a.txt": b"a", "prepared/b.txt": b"b", "parts/c.txt": b"c", "rows/report.json": report, "rows/d.txt": b"d"}
    files |= {"prepared/report.json": b"my own", "x/parts/plan.json": report, "x/parts/e.txt": b"e"}
    for name, content in files.items():
        bucket.pipe_file(f"/{tmp_path.name}/mine/{name}", content)
    seen = []

    def prepare(data: str, out: str) -> dict:
        seen.extend(sorted(str(path.relative_to(data)) for path in Path(data).rglob("*.txt")))
        return {}

    pipeline.prepare_urls(prepare, url, str(tmp_path / "out"))
    assert seen == ["a.txt", "parts/c.txt", "prepared/b.txt"]


def test_text_at_a_url_becomes_a_folder_at_a_url_whole_or_not_at_all(tmp_path, monkeypatch, capsys, made):
    program, bucket = made.program, fsspec.filesystem("memory")
    data, out = f"memory://{tmp_path.name}/text", f"memory://{tmp_path.name}/rows"
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(program.module, program.size[0], program.size[1])
    bucket.put(f"{made.text}/", data, recursive=True)

    def refused(message: str, *arguments) -> None:
        with pytest.raises(SystemExit):
            made.main("--data", data, *arguments)
        assert message in capsys.readouterr().err

    refused("is a URL; name the folder or the URL of the result with --out")
    with monkeypatch.context() as patch:  # what is uploaded last must not be there
        put, fails = bucket.put_file, lambda path, to: put(path, to) if Path(path).name in pipeline.LAST else 1 / 0
        patch.setattr(remote, "PAUSES", ())
        patch.setattr(bucket, "put_file", fails)
        refused("; give the same command again", "--out", out)
    with pytest.raises(InputError, match="not prepared to its end"):
        program.open(out, "train")
    local_copy.cache_clear()
    made.main("--data", data, "--out", out)
    assert len(program.open(out, "train")) == len(program.open(str(made.out), "train"))
    local_copy.cache_clear()
    assert contents(Path(local_copy(out))) == made.contents
    uploaded = bucket.ls(out, detail=True)
    made.main("--data", data, "--out", out)
    assert "is already prepared" in capsys.readouterr().out and bucket.ls(out, detail=True) == uploaded
    flag, value = made.flags[:2]
    refused(f"{out} was prepared with other --", "--out", out, flag, value + 8)


KILLED = """
import os, pathlib, sys
from data.prepare.files import whole
with whole(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half of it")
    file.flush()
    os.kill(os.getpid(), 9)
"""


def test_a_file_that_kill_9_cuts_short_gets_no_name(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "a"], cwd=ROOT)
    (partial,) = tmp_path.iterdir()
    assert killed.returncode == -signal.SIGKILL and partial.suffix == ".partial" and partial.stat().st_size > 0


def test_the_command_and_neither_workers_nor_packing_nor_the_size_of_chunks_change_the_result(
    tmp_path, monkeypatch, capsys, made
):
    def command(*arguments) -> None:
        monkeypatch.setattr(sys, "argv", ["prepare", *map(str, arguments), "--workers", "1"])
        monkeypatch.delitem(sys.modules, made.program.module.__name__, raising=False)  # else runpy warns
        runpy.run_module(made.program.module.__name__, run_name="__main__")

    made.program.write(tmp_path / "plain", "")
    any_size = made.program.any_size
    made.prepare(tmp_path / "workers", text=None if any_size else tmp_path / "plain", workers=2)
    assert contents(tmp_path / "workers") == made.contents
    capsys.readouterr()
    command("--data", tmp_path / "plain", *made.flags, "--out", tmp_path / "whole")
    assert not any_size or contents(tmp_path / "whole") == made.contents
    assert re.search(made.program.summary, capsys.readouterr().out)
    with pytest.raises(SystemExit) as stopped:
        command("--data", tmp_path / "nowhere")
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    assert re.fullmatch(r"error: there is no .*nowhere; expected .*\n", printed.err)


def test_a_finished_preparation_is_not_repeated_and_other_flags_or_sources_are_refused(tmp_path, capsys, made):
    text, out = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in (made.text, made.out))
    assert made.program.open(str(out), "train")
    (out / "parts").mkdir()  # of a call that was killed at its very end
    for path in out.glob("*.npy"):
        path.write_bytes(b"not written again")
    with finished_files() as names:
        assert made.prepare(out, text=text) == made.report and names == []
    assert "prepared is already prepared" in capsys.readouterr().out
    assert set(contents(out)) == set(made.contents) and not (out / "parts").exists()
    made.refuse_another_flag(out)
    longer = min(text.iterdir())
    longer.write_bytes(longer.read_bytes() + b"more")
    size = longer.stat().st_size
    message = rf"prepared with other sources: .*\({size - 4} bytes\).* now .*{longer.name} \({size} bytes\)"
    with pytest.raises(InputError, match=message):
        made.prepare(out, text=text)


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_costs_a_sentence_and_leaves_no_part(tmp_path, number):
    path = tmp_path / "chunk.npz"
    message = f"chunk.npz cannot be written: {os.strerror(number)}; make room, and give the same command again"
    with pytest.raises(InputError, match=message), files.whole(path) as file:
        file.write(b"a part")
        raise OSError(number, os.strerror(number))
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="Input/output error"), files.whole(path):  # of what is read
        raise OSError(errno.EIO, "Input/output error")
