"""What the preparations have in common (data/prepare/pipeline.py).

Plan, passes, resume, report, command line.
"""

import contextlib
import dataclasses
import errno
import io
import json
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

import fsspec
import numpy as np
import pytest
from click_tables import FLAGS as CLICK_FLAGS
from click_tables import draw
from click_tables import write as write_table
from corpora import contents, pair_corpus, text_corpus
from criteo_text import random_rows, write

from data import remote
from data.criteo import open_clicks
from data.prepare import clicks, criteo, files, pipeline, sources, text, wmt
from data.remote import local_copy
from data.text import open_text
from data.wmt import open_pairs
from errors import InputError

ROOT = Path(__file__).parent.parent


def write_clicks(folder: Path, end: str) -> None:
    """Writes three days, the second packed if `end` is .gz."""
    write(folder / "day_0", random_rows(70, 0))
    write(folder / f"day_1{end}", random_rows(70, 1))
    write(folder / "day_2", random_rows(70, 2))


def write_log(folder: Path, end: str) -> None:
    """Writes two files of rows of your own, the second packed if `end` is .gz."""
    write_table(folder / "a.csv", draw(60).columns)
    write_table(folder / f"b.csv{end}", draw(60, seed=1).columns)


@dataclasses.dataclass(frozen=True)
class Program:
    """A preparation, and what the tests expect of it."""

    module: ModuleType
    write: Callable[[Path, str], object]  # writes the text to a folder; with ".gz" packed
    open: Callable[[str, str], object]  # opens a split as training does
    chunk_setting: str  # the module's constant with the size of chunks
    small_chunk: int
    smaller_chunk: int
    any_size: bool  # chunks of any size give the same result
    flags: dict
    summary: str
    refused: dict[str, dict]  # messages, and the flags that cause them


PROGRAMS = {
    "criteo": Program(
        module=criteo,
        write=write_clicks,
        open=open_clicks,
        chunk_setting="CHUNK_BYTES",
        small_chunk=5000,
        smaller_chunk=3000,
        any_size=True,
        flags={"threshold": 2},
        summary="140 training and 70 evaluation rows; ",
        refused={
            "--threshold is 0; expected 1": {"threshold": 0},
            "--max-rows is 2; expected 0, or 3": {"max_rows": 2},
            "--hash-rows is -1; expected 0, or 3": {"hash_rows": -1},
            "--bad-rows is 1.0; expected a share": {"bad_rows": 1.0},
            "--threshold 5 needs a vocabulary.*drop one": {"threshold": 5, "hash_rows": 100},
        },
    ),
    "clicks": Program(
        module=clicks,
        write=write_log,
        open=open_clicks,
        chunk_setting="CHUNK_ROWS",
        small_chunk=20,
        smaller_chunk=13,
        any_size=False,
        flags={"threshold": 2, **CLICK_FLAGS},
        summary=r"\d+ training rows with \d+ clicks and \d+ evaluation rows with \d+; 2 numbers; ",
        refused={
            "--threshold is 0; expected 1": {"threshold": 0},
            "--most is 0; expected at least 1": {"most": 0},
            "--eval-share is 0; expected a share": {"eval_share": 0},
        },
    ),
    "text": Program(
        module=text,
        write=text_corpus,
        open=open_text,
        chunk_setting="PIECE_BYTES",
        small_chunk=1500,
        smaller_chunk=800,
        any_size=False,
        flags={"length": 32, "vocab_size": 300},
        summary=(
            r"train: documents 120, sentences \d+, .*\n"
            r"valid: documents 8.*\n"
            r"300 tokens in the vocabulary; "
        ),
        refused={
            "length is 4; expected 8 or more": {"length": 4},
            "--vocab-size is 200; expected at least 261 for roberta": {
                "kind": "roberta",
                "vocab_size": 200,
            },
            "--valid-share is 1; expected a share between 0 and 1": {"valid_share": 1},
            "--sample is 0; expected at least 1": {"sample": 0},
        },
    ),
    "wmt": Program(
        module=wmt,
        write=pair_corpus,
        open=open_pairs,
        chunk_setting="CHUNK_LINES",
        small_chunk=13,
        smaller_chunk=8,
        any_size=True,
        flags={"vocabulary": 160},
        summary=(
            "60 training pairs read; dropped: none\n"
            "tokens: .*\n"
            "tokens per word: .*\n"
            "60 training pairs, 7 valid; 160 sym"
        ),
        refused={
            "--source is e n; expected a language": {"source": "e n"},
            "--target is de; expected another language": {"source": "de"},
            "--vocabulary is 99; expected 100 to": {"vocabulary": 99},
            "--vocabulary 100 is too small for the text; expected .* 10[0-9] characters": {
                "vocabulary": 100,
            },
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
    """What a program makes of packed text in small chunks.

    Attributes:
        files: that got their names on the way.
        flags: of the command line, as words.
    """

    def __init__(self, program: Program, folder: Path):
        self.program = program
        self.text = folder / "text"
        self.out = folder / "prepared"
        program.write(self.text, ".gz")
        with finished_files() as self.files:
            self.report = self.prepare(self.out)
        self.contents = contents(self.out)
        self.flags = []
        for name, value in program.flags.items():
            self.flags += [f"--{name.replace('_', '-')}", value]

    def prepare(self, out: Path, chunk: int = 0, text: Path | None = None, **flags) -> dict:
        """Prepares in chunks of a size, small by default; returns the report."""
        program = self.program
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program.module, program.chunk_setting, chunk or program.small_chunk)
            return program.module.prepare(text or self.text, out, **program.flags | flags)

    def main(self, *arguments) -> None:
        """Runs the command line in one process, with the program's flags."""
        words = ["--workers", 1, *self.flags, *arguments]
        self.program.module.main([str(word) for word in words])

    def refuse_another_flag(self, out: Path) -> None:
        """Asserts that a folder is not prepared with another value of the first flag."""
        flag, value = next(iter(self.program.flags.items()))
        change = f"prepared with other --{flag}: {value}, now {value + 8}"
        with pytest.raises(InputError, match=f"{out.name} was {change}; choose another --out"):
            self.prepare(out, **{flag: value + 8})


@contextlib.contextmanager
def finished_files(most: int = sys.maxsize) -> Iterator[list[str]]:
    """Lists files as they get their names, which makes them finished.

    Interrupts the call once there are `most`.
    """
    names = []
    replace = os.replace
    touch = Path.touch

    def interrupt_after_most() -> None:
        if len(names) == most:
            raise KeyboardInterrupt

    def listed_replace(partial, path) -> None:
        interrupt_after_most()
        replace(partial, path)
        names.append(path.name)

    def listed_touch(path) -> None:
        interrupt_after_most()
        touch(path)
        names.append(path.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", listed_replace)
        patch.setattr(Path, "touch", listed_touch)
        yield names


@pytest.fixture(scope="module", params=PROGRAMS)
def made(request, tmp_path_factory) -> Made:
    return Made(PROGRAMS[request.param], tmp_path_factory.mktemp(request.param))


# ---- resume ------------------------------------------------------------------------------------
def test_an_interrupted_preparation_resumes(tmp_path, capsys, made):
    """Each call is interrupted after three files, until one ends: all passes are resumed."""
    out = tmp_path / "out"
    finished = []
    for interrupted in range(30):
        chunk = made.program.small_chunk
        if interrupted:
            chunk = made.program.smaller_chunk  # the chunks that are there still fit
        with finished_files(3) as names, contextlib.suppress(KeyboardInterrupt):
            made.prepare(out, chunk=chunk)
            break

        finished += names
        whole = {path.name for path in (out / "parts").iterdir() if path.suffix != ".partial"}
        assert whole <= set(finished)
        # As another process leaves them.
        (out / "tokenizer.1.partial").mkdir(exist_ok=True)
        (out / "half.2.partial").touch()
        if not interrupted:
            with pytest.raises(InputError, match="not prepared to its end"):
                made.program.open(str(out), "train")
            made.refuse_another_flag(out)

    assert contents(out) == made.contents
    assert not list(out.glob("*.partial"))
    assert interrupted > 5
    printed = capsys.readouterr().out
    assert printed.count("resuming the unfinished preparation") == interrupted
    repeated = Counter(finished + names) - Counter(made.files)
    first_of_two = Counter(["prepared.json", "learnt.json", "train.en-de.de.bin"])
    assert repeated <= first_of_two, "more than the first of two files of a task"


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

    assert killed.returncode == -signal.SIGKILL
    (partial,) = tmp_path.iterdir()
    assert partial.suffix == ".partial"
    assert partial.stat().st_size > 0


def test_a_finished_preparation_is_not_repeated(tmp_path, capsys, made):
    text = Path(shutil.copytree(made.text, tmp_path / "text"))
    out = Path(shutil.copytree(made.out, tmp_path / "prepared"))
    assert made.program.open(str(out), "train")
    (out / "parts").mkdir()  # of a call that was killed at its very end
    for path in out.glob("*.npy"):
        path.write_bytes(b"not written again")

    with finished_files() as names:
        report = made.prepare(out, text=text)

    assert report == made.report
    assert names == []
    assert "prepared is already prepared" in capsys.readouterr().out
    assert set(contents(out)) == set(made.contents)
    assert not (out / "parts").exists()


def test_other_flags_or_sources_of_a_finished_folder_are_refused(tmp_path, made):
    text = Path(shutil.copytree(made.text, tmp_path / "text"))
    out = Path(shutil.copytree(made.out, tmp_path / "prepared"))

    made.refuse_another_flag(out)

    longer = min(text.iterdir())
    longer.write_bytes(longer.read_bytes() + b"more")
    size = longer.stat().st_size
    change = f"{longer.name} had {size - 4} bytes, now {size}"
    with pytest.raises(InputError, match=f"was prepared from other data: {change}; choose"):
        made.prepare(out, text=text)


def test_a_file_of_the_same_size_that_changed_is_refused(tmp_path, made):
    """Even where its time is that of the one before."""
    text = Path(shutil.copytree(made.text, tmp_path / "text"))
    changed = min(text.iterdir())
    stat = changed.stat()
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")
    os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    message = f"from other data: {changed.name} has other content of the same size; choose"
    with pytest.raises(InputError, match=message):
        made.prepare(made.out, text=text)


def test_a_copy_of_the_files_with_other_times_is_the_same(tmp_path, capsys, made):
    text = tmp_path / "text"
    shutil.copytree(made.text, text, copy_function=shutil.copyfile)
    for path in text.iterdir():
        os.utime(path, (1, 1))

    assert made.prepare(made.out, text=text) == made.report
    assert capsys.readouterr().out.endswith("prepared is already prepared\n")


def as_older(plan: Path) -> None:
    """Makes a plan or a report what an older version wrote: without marks of the content."""
    content = json.loads(plan.read_text())
    for source in content["sources"]:
        del source["sha256"]
    plan.write_text(json.dumps(content))


def test_what_an_older_version_prepared_is_usable(tmp_path, capsys, made):
    out = Path(shutil.copytree(made.out, tmp_path / "prepared"))
    report = next(path for path in out.iterdir() if path.name in pipeline.LAST[:3])
    as_older(report)

    made.prepare(out)

    assert "names and sizes; whether their content has changed is not known" in (
        capsys.readouterr().out
    )
    assert made.program.open(str(out), "train")
    text = Path(shutil.copytree(made.text, tmp_path / "text"))
    min(text.iterdir()).write_bytes(b"another size")
    with pytest.raises(InputError, match=r"other data: .* bytes.* then, .*\(12 bytes.* now; ch"):
        made.prepare(out, text=text)


def test_what_an_older_version_began_is_resumed(tmp_path, capsys, made):
    out = tmp_path / "prepared"
    with finished_files(3), contextlib.suppress(KeyboardInterrupt):
        made.prepare(out)
    as_older(out / "parts/plan.json")

    made.prepare(out)

    assert "resuming the unfinished preparation" in capsys.readouterr().out
    assert contents(out) == made.contents


def test_a_file_that_changes_meanwhile_is_refused(tmp_path, monkeypatch, made):
    text = Path(shutil.copytree(made.text, tmp_path / "text"))
    changed = min(text.iterdir())
    finish = pipeline.Preparation.finish

    def change_and_finish(self, figures: dict) -> dict:
        changed.write_bytes(changed.read_bytes() + b"more")
        return finish(self, figures)

    monkeypatch.setattr(pipeline.Preparation, "finish", change_and_finish)
    message = rf"{changed.name} had .* bytes, now .*: it changed while it was prepared"
    with pytest.raises(InputError, match=message):
        made.prepare(tmp_path / "out", text=text)
    with pytest.raises(InputError, match="not prepared to its end"):
        made.program.open(str(tmp_path / "out"), "train")


# ---- URLs --------------------------------------------------------------------------------------
def test_at_a_url_only_what_make_made_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    bucket = fsspec.filesystem("memory")
    report = b'{"flags": {}, "sources": []}'
    files = {
        "a.txt": b"a",
        "prepared/b.txt": b"b",
        "prepared/report.json": b"my own",
        "parts/c.txt": b"c",
        "rows/report.json": report,
        "rows/d.txt": b"d",
        "x/parts/plan.json": report,
        "x/parts/e.txt": b"e",
    }
    for name, content in files.items():
        bucket.pipe_file(f"/{tmp_path.name}/mine/{name}", content)
    seen = []

    def prepare(data: str, out: str) -> dict:
        paths = [str(path.relative_to(data)) for path in Path(data).rglob("*.txt")]
        seen.extend(sorted(paths))
        return {}

    url = f"memory://{tmp_path.name}/mine"
    pipeline.prepare_urls(prepare, url, str(tmp_path / "out"))

    assert seen == ["a.txt", "parts/c.txt", "prepared/b.txt"]


@dataclasses.dataclass(frozen=True)
class AtUrls:
    """Text at a URL, and the URL for the result."""

    made: Made
    data: str
    out: str
    capsys: pytest.CaptureFixture

    def prepare(self) -> None:
        """Runs the command line."""
        self.made.main("--data", self.data, "--out", self.out)

    def refused(self, message: str, *arguments) -> None:
        """Asserts that the command line ends with a message on stderr."""
        with pytest.raises(SystemExit):
            self.made.main("--data", self.data, *arguments)
        assert message in self.capsys.readouterr().err


@pytest.fixture
def at_urls(tmp_path, monkeypatch, capsys, made) -> AtUrls:
    program = made.program
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(program.module, program.chunk_setting, program.small_chunk)
    data = f"memory://{tmp_path.name}/text"
    fsspec.filesystem("memory").put(f"{made.text}/", data, recursive=True)
    return AtUrls(made, data, f"memory://{tmp_path.name}/rows", capsys)


def test_a_folder_at_a_url_is_whole_or_not_at_all(at_urls, monkeypatch, capsys, made):
    bucket = fsspec.filesystem("memory")
    put_file = bucket.put_file
    out = at_urls.out

    def put_only_what_is_last(path, to) -> None:
        if Path(path).name not in pipeline.LAST:
            raise ZeroDivisionError
        put_file(path, to)

    at_urls.refused("is a URL; name the folder or the URL of the result with --out")
    with monkeypatch.context() as patch:  # what is uploaded last must not be there
        patch.setattr(remote, "PAUSES", ())
        patch.setattr(bucket, "put_file", put_only_what_is_last)
        at_urls.refused("; give the same command again", "--out", out)
    with pytest.raises(InputError, match="not prepared to its end"):
        made.program.open(out, "train")

    local_copy.cache_clear()
    at_urls.prepare()
    uploaded_rows = made.program.open(out, "train")
    assert len(uploaded_rows) == len(made.program.open(str(made.out), "train"))
    local_copy.cache_clear()
    assert contents(Path(local_copy(out))) == made.contents

    uploaded = bucket.ls(out, detail=True)
    at_urls.prepare()
    assert "is already prepared" in capsys.readouterr().out
    assert bucket.ls(out, detail=True) == uploaded
    flag, value = made.flags[:2]
    at_urls.refused(f"{out} was prepared with other --", "--out", out, flag, value + 8)


def test_large_files_at_a_url_are_known_by_their_tags(at_urls, monkeypatch, tmp_path, capsys):
    """Whenever they were copied: another host has copies of other times."""
    monkeypatch.setattr(sources, "CHECKSUM_BYTES", 0)
    out = ["--out", tmp_path / "out"]
    at_urls.made.main("--data", at_urls.data, *out)
    shutil.rmtree(tmp_path / "cache")
    local_copy.cache_clear()

    at_urls.made.main("--data", at_urls.data, *out)

    assert "out is already prepared\n" in capsys.readouterr().out
    bucket = fsspec.filesystem("memory")
    changed = min(bucket.find(at_urls.data))
    content = bucket.cat_file(changed)
    bucket.pipe_file(changed, content[:-1] + b"?")
    local_copy.cache_clear()
    name = Path(changed).name
    at_urls.refused(f"other data: {name} has another etag or time in its store", *out)


# ---- the command line --------------------------------------------------------------------------
@pytest.fixture
def plain(tmp_path, made) -> Path:
    """The text of the program, not packed."""
    made.program.write(tmp_path / "plain", "")
    return tmp_path / "plain"


@pytest.fixture
def command(monkeypatch, made):
    """A function that runs the program as `python -m` does, in one process."""
    name = made.program.module.__name__

    def run(*arguments) -> None:
        monkeypatch.setattr(sys, "argv", ["prepare", *map(str, arguments), "--workers", "1"])
        monkeypatch.delitem(sys.modules, name, raising=False)  # else runpy warns
        runpy.run_module(name, run_name="__main__")

    return run


# The workers of text take as long as those of the other three to start.
@pytest.mark.parametrize(
    "made",
    [pytest.param(name, marks=pytest.mark.slow if name == "text" else ()) for name in PROGRAMS],
    indirect=True,
    scope="module",
)
def test_workers_and_packing_do_not_change_the_result(tmp_path, plain, made):
    source = made.text  # packed
    if not made.program.any_size:
        source = plain  # of the other programs, the command's test compares it

    made.prepare(tmp_path / "workers", text=source, workers=2)

    assert contents(tmp_path / "workers") == made.contents


def test_the_command_prints_a_summary(tmp_path, capsys, plain, command, made):
    command("--data", plain, *made.flags, "--out", tmp_path / "whole")

    assert re.search(made.program.summary, capsys.readouterr().out)
    if made.program.any_size:
        assert contents(tmp_path / "whole") == made.contents


def test_the_command_explains_a_missing_folder(tmp_path, capsys, command):
    with pytest.raises(SystemExit) as stopped:
        command("--data", tmp_path / "nowhere")

    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"error: there is no .*nowhere; expected .*\n", printed.err)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", r"--data is missing; .*\.\w+ --help shows all flags"),
        ("--data a b", r"b is no flag; "),
        ("--data a --worker 2", r"--worker is no flag \(is it --workers\?\); "),
        ("--data a --length two", r"--length cannot be used: .*'two'; expected INT; "),
        ("--data a --length", r"--length needs INT; "),
    ],
)
def test_a_wrong_command_line_is_one_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        text.main(arguments.split())

    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(f"error: {sentence}.*\n", printed.err)


# ---- what cannot be prepared -------------------------------------------------------------------
def test_flags_that_no_preparation_can_use_are_explained(tmp_path, made):
    refused = {"--workers is 0; expected at least 1": {"workers": 0}, **made.program.refused}
    for message, flags in refused.items():
        with pytest.raises(InputError, match=message):
            made.prepare(tmp_path / "flags", **flags)


def test_a_file_in_the_place_of_the_result_is_explained(tmp_path, made):
    (tmp_path / "file").touch()

    message = r"file\S* cannot be written: .*; choose another folder with --out"
    with pytest.raises(InputError, match=message):
        made.prepare(tmp_path / "file")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-20], "ended before"),
        (lambda content: b"text", "Not a gzipped file"),
    ],
)
def test_a_damaged_packed_file_is_explained(tmp_path, made, damage, message):
    data = tmp_path / "text"
    made.program.write(data, ".gz")
    packed = next(data.glob("*.gz"))
    packed.write_bytes(damage(packed.read_bytes()))

    pattern = rf"{packed.name} cannot be (read|decompressed): .*{message}"
    with pytest.raises(InputError, match=pattern):
        made.prepare(tmp_path / "out", text=data)


# ---- a full disk -------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_costs_a_sentence_and_leaves_no_part(tmp_path, number):
    reason = os.strerror(number)
    message = f"chunk.npz cannot be written: {reason}; make room, and give the same command again"

    with pytest.raises(InputError, match=message), files.whole(tmp_path / "chunk.npz") as file:
        file.write(b"a part")
        raise OSError(number, reason)
    assert not list(tmp_path.iterdir())


def test_an_error_of_what_is_read_stays_as_it_is(tmp_path):
    path = tmp_path / "chunk.npz"

    with pytest.raises(OSError, match="Input/output error"), files.whole(path):
        raise OSError(errno.EIO, "Input/output error")


FULL_DISK = """
import sys, numpy as np
from pathlib import Path
from data.prepare.files import create_array, write_rows
from errors import InputError
path = Path(sys.argv[1])
try:
    create_array(path, np.float32, (1 << 20, 1))
    write_rows(path, 0, np.ones((1 << 20, 1)))
except InputError as error:
    print(error)
print(path.exists())
"""


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_arrays_that_do_not_fit_are_a_sentence_at_once(small_disk):
    """And not the signal by which a full disk kills what writes into a memory map."""
    command = [sys.executable, "-c", FULL_DISK, small_disk / "train_dense.npy"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
    message = (
        r"\S*train_dense.npy cannot be written: No space left on device; it needs 4,194,304 bytes, "
        r"and (1,048,576|1,04\d,\d{3}) are free; make room, and give the same command again\n"
        r"False\n"
    )
    assert re.fullmatch(message, ended.stdout)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_array_without_room_leaves_no_file(tmp_path, monkeypatch, number):
    def refuse(descriptor: int, start: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(InputError, match=r"a.npy cannot be written: .*; it needs 24 bytes, and"):
        files.create_array(tmp_path / "a.npy", np.int32, (3, 2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_without_allocation_zeros_are_written(tmp_path, monkeypatch, number):
    """None: the system has no such function."""

    def refuse(descriptor: int, start: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    if number:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    else:
        monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(files, "ZEROS", 1000)
    path = tmp_path / "a.npy"
    files.create_array(path, np.int32, (700, 2))

    assert path.stat().st_blocks * 512 >= 5600
    np.testing.assert_array_equal(np.load(path), np.zeros((700, 2), np.int32))


def test_an_array_has_its_space_on_the_disk_and_its_rows(tmp_path):
    path = tmp_path / "a.npy"
    files.create_array(path, np.float32, (100_000, 2))
    assert path.stat().st_blocks * 512 >= 800_000

    rows = np.arange(10).reshape(5, 2)
    files.write_rows(path, 99_995, rows)

    found = np.load(path)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[99_995:], rows)
    assert not found[:99_995].any()
    with pytest.raises(ValueError, match=r"rows \(5, 2\) from 99996 on are not in"):
        files.write_rows(path, 99_996, rows)


def test_rows_for_a_full_disk_are_a_sentence(tmp_path, monkeypatch):
    """Of a file that an older version created without its space, or on a disk that copies what is
    written anew."""
    path = tmp_path / "a.npy"
    files.create_array(path, np.int32, (4, 2))

    class Full(io.FileIO):
        def write(self, content) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "open", lambda path, mode: Full(path, mode), raising=False)
    with pytest.raises(InputError, match=r"a.npy cannot be written: No space .*; make room, and"):
        files.write_rows(path, 0, np.ones((4, 2)))
